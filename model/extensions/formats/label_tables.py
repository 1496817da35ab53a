"""Labels in CSV tables, with or without a header, and their columns in any order."""

import csv
import re
from collections.abc import Sequence
from typing import Final

from model.checkpoint.label_forms import (
    FORMS,
    INDEX_NAMES,
    LABEL_NAMES,
    in_order,
    is_index,
    lines_of,
)
from model.checkpoint.local_files import reading
from model.errors import CheckpointError

_SUFFIXES: Final = (".csv", ".tsv")

# Headings of numbers that number the labels, besides `INDEX_NAMES`, and of pictures.
_INDEX: Final = re.compile(
    r"(class|label|category|target|train|cls)?_?(index|idx|id|number|no|nr|key|code|value)?|"
    r"y|#|position|unnamed:_\d+"
)
_WORDNET_ID: Final = re.compile(r"n\d+")
_PICTURE: Final = re.compile(
    r"(file|image|img|picture|photo)s?_?(name|path|file|id|url)?s?|"
    r"(full_?|rel(ative)?_?)?paths?|urls?"
)

# The number of a line, and its cells.
Row = tuple[int, list[str]]


def read(text: str, where: str, suffix: str) -> tuple[str, ...] | None:
    """Return the labels of a CSV table; None for another file."""
    if suffix not in _SUFFIXES:
        return None
    # Excel writes the separator into a first line, `sep=;`.
    rows = _rows(lines_of(re.sub(r"\Asep=.[\r\n]+", "", text), where), where)
    names = [cell.lower().replace(" ", "_") for cell in rows[0][1]]
    width = len(names)
    numeric = _index_columns(rows[1:], width) if len(rows) > 1 < width else []
    is_named = bool(numeric) or not {*INDEX_NAMES, *LABEL_NAMES}.isdisjoint(names)
    if is_named and not any(map(is_index, names)):
        rows = rows[1:]
    else:
        names = []
    if not rows:
        raise CheckpointError(f"{where}: a header without labels")
    if width == 1:
        numbered = ((f"line {line}", index, cells[0]) for index, (line, cells) in enumerate(rows))
        return in_order(numbered, where)
    numeric = _index_columns(rows, width)
    index = _column(numeric, names, INDEX_NAMES)
    others = [column for column in range(width) if column != index]
    if index is not None and not names:
        others = _without_ids(rows, others, where)
    label = _column(others, names, LABEL_NAMES)
    _refuse_other_tables(names, index, others if label is None else [label], where)
    if index is None or label is None:
        raise CheckpointError(
            f"{where}: its {width} columns do not tell which are index and label; expected {FORMS}"
        )
    return in_order(((f"line {line}", cells[index], cells[label]) for line, cells in rows), where)


def _refuse_other_tables(
    names: Sequence[str], index: int | None, labels: Sequence[int], where: str
) -> None:
    """Refuse a table whose header tells that it lists pictures, or how many each class has.

    Args:
        names: cells of the header; empty without one.
        index: column of numbers that may be the index.
        labels: columns that may be the label.
        where: name of the file in messages.

    Raises:
        CheckpointError: it is such a table.
    """
    if not names:
        return
    picture = next((names[column] for column in labels if _PICTURE.fullmatch(names[column])), None)
    if picture is not None:
        raise CheckpointError(
            f"{where}: its column {picture!r:.100} lists pictures, not labels: give a table with "
            "one line for each class, index and label"
        )
    if index is not None and not _INDEX.fullmatch(names[index]):
        raise CheckpointError(
            f"{where}: its column {names[index]!r:.100} need not be the index of the classes: if "
            "it is, call it index; else give one label a line, in the order of the head's rows"
        )


def _index_columns(rows: Sequence[Row], width: int) -> list[int]:
    """Return the columns whose cells all are numbers that can count classes."""
    return [column for column in range(width) if all(is_index(cells[column]) for _, cells in rows)]


def _without_ids(rows: Sequence[Row], columns: Sequence[int], where: str) -> list[int]:
    """Return the columns that do not hold WordNet ids; refuse several of text, without a header."""
    left = [
        column
        for column in columns
        if not all(_WORDNET_ID.fullmatch(cells[column]) for _, cells in rows)
    ]
    if len(left) > 1:
        raise CheckpointError(
            f"{where}: {len(left)} columns can be the label: add a first line that names the "
            "columns, such as index,label,group"
        )
    return left


def _rows(lines: Sequence[str], where: str) -> list[Row]:
    """Return the rows of a CSV table with their line numbers, all of the same length."""
    delimiter = max("\t;,|", key=lines[0].count)
    reader = csv.reader(
        (f"{line}\n" for line in lines), delimiter=delimiter, skipinitialspace=True, strict=True
    )
    with reading(where, "not a CSV table", csv.Error):
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    width = len(rows[0][1])
    for number, row in rows:
        if len(row) != width or not any(row):
            raise CheckpointError(
                f"{where}: line {number} has {len(row)} cells, expected {width or 1}"
            )
    return rows


def _column(candidates: Sequence[int], names: Sequence[str], known: Sequence[str]) -> int | None:
    """Return the column with the first known name, else the only candidate.

    Of two columns without a header, it is the first.
    """
    named = [column for name in known for column in candidates if names and names[column] == name]
    if named:
        return named[0]
    is_clear = len(candidates) == 1 or (len(candidates) == 2 and not names)
    return candidates[0] if is_clear else None
