"""The forms of labels in files: lines, tables, JSON, and YAML.

- One label a line, with or without its index: `0 cat`.
- A CSV table with a column of indices.
- JSON from index to label (`id2label`, Keras' `imagenet_class_index.json`), from label to index
  (`class_to_idx`), or a list.
- The `names` of a YAML file.

Indices in a form are checked: each of 0...N-1 once.
"""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from model.checkpoint.label_documents import parsed, parsed_json
from model.checkpoint.local_files import reading
from model.errors import CheckpointError

FORMS: Final = (
    "one label a line, a list or an object of JSON, a CSV table of index and label, or names: in "
    "YAML (docs/checkpoints.md#statistics-and-labels-for-formats-that-carry-none)"
)
NAME_THEM: Final = "name the labels with --labels FILE (VIT_LABELS)"
# Keys of an object that hold its labels, in order of preference.
_HOLDERS: Final = (
    "id2label",
    "label2id",
    "class_to_idx",
    "idx_to_class",
    "label_names",
    "labels",
    "names",
    "class_names",
    "classes",
    "categories",
)
_INDEX_NAMES: Final = (
    "index",
    "idx",
    "id",
    "class_id",
    "class_index",
    "class_idx",
    "label_id",
    "number",
    "",
)
_LABEL_NAMES: Final = (
    "label",
    "name",
    "class",
    "class_name",
    "label_name",
    "category",
    "title",
    "description",
)
# Suffixes of files with one label a line, or with labels as a setting lists them.
LINE_SUFFIXES: Final = ("", ".txt", ".text", ".names", ".labels", ".classes", ".list", ".lst")
_TABLE_SUFFIXES: Final = (".csv", ".tsv")
_DOCUMENT_SUFFIXES: Final = (".json", ".yaml", ".yml")
# Text between an index and its label. Possessive quantifiers keep the time of a match short.
_SEPARATOR: Final = r"(?<=\S)(?:\s*+(?:[-=]>|[:,;=|])\s*+|\s++(?:[-\u2013\u2014]\s++)?)"
_INDEX: Final = r"\(?(?P<index>\d{1,9})"
# An index before a label, as Teachable Machine writes it, or after it: `0 cat`, `0. cat`, `cat,0`.
_NUMBERED: Final = (
    re.compile(rf"{_INDEX}(?:\.\s+|\)?{_SEPARATOR}|\)\s*)(?P<label>\S.*)"),
    re.compile(rf"(?P<label>\S.*?){_SEPARATOR}{_INDEX}\)?"),
)
# Separators that are seldom in a label.
_CLEAR: Final = re.compile(r"\(?\d+\s*[:,;=|)].*|.*\t.*")
# Texts around each label of a file: a WordNet id, quotes, a comma.
_DECORATIONS: Final = tuple(
    map(re.compile, (r"n\d{8}\s+(\S.*)", r'"([^"]+)",?', r"'([^']+)',?", r"(.*\S)\s*,"))
)

# A name that transformers makes up for a class without one.
UNNAMED: Final = re.compile(r"LABEL_\d+")

# The position of a label in a file, its index as written there, and the label.
Row = tuple[str, object, object]


def labels_in_file(text: str, where: str, suffix: str) -> tuple[str, ...]:
    """Return the labels in the text of a file.

    Args:
        text: text of the file, without a byte order mark.
        where: name of the file in messages.
        suffix: suffix of its name, in lower case.

    Raises:
        CheckpointError: a form that is not read, or an index that is missing or given twice.
    """
    if not text.strip():
        raise CheckpointError(f"{where}: holds no labels; expected {FORMS}")
    if suffix not in (*LINE_SUFFIXES, *_TABLE_SUFFIXES, *_DOCUMENT_SUFFIXES):
        raise CheckpointError(f"{where}: a file {suffix} is not read as labels; expected {FORMS}")
    if suffix in _DOCUMENT_SUFFIXES or text.lstrip().startswith(("{", "[")):
        return labels_in_value(parsed(text, where, suffix), where)
    lines = text.replace("\r\n", "\n").replace("\r", "\n").rstrip().split("\n")
    if suffix in _TABLE_SUFFIXES:
        return _labels_in_table(lines, where)
    empty = next((number for number, line in enumerate(lines, 1) if not line.strip()), None)
    if empty is not None:
        raise CheckpointError(f"{where}: line {empty} is empty; expected one label a line")
    lines = [line.strip() for line in lines]
    return _labels_in_numbered_lines(lines, where) or _bare(lines)


def labels_in_json(text: str, where: str) -> tuple[str, ...]:
    """Return the labels in a JSON value; raise `CheckpointError` as `labels_in_file`."""
    return labels_in_value(parsed_json(text, where), where)


def labels_in_value(value: Any, where: str) -> tuple[str, ...]:
    """Return the labels in a value of JSON or YAML; raise errors as `labels_in_file`."""
    if isinstance(value, list) and value:
        return _labels_in_list(value, where)
    if not isinstance(value, dict) or not value:
        raise CheckpointError(f"{where}: holds no labels; expected {FORMS}")
    nested = [key for key, inner in value.items() if isinstance(inner, list | dict) and inner]
    holders = [key for key in _HOLDERS if key in nested]
    if holders:
        labels = labels_in_holder(value, holders[0], where)
        if holders[0] == "id2label" and "label2id" in holders:
            require_agreement(labels, value["label2id"], where)
        return labels
    if all(map(_is_index, value)) and not all(isinstance(label, int) for label in value.values()):
        return _in_order(
            ((repr(index)[:100], index, _without_synset(label)) for index, label in value.items()),
            where,
        )
    if all(map(_is_index, value.values())):
        rows = ((repr(label)[:100], index, label) for label, index in value.items())
        return _in_order(rows, where)
    if len(nested) == 1:
        return labels_in_holder(value, nested[0], where)
    raise CheckpointError(
        f"{where}: an object, but neither from index to label nor from label to index; expected "
        f"{FORMS}"
    )


def labels_in_holder(fields: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Return the labels in a field of an object; raise errors as `labels_in_file`.

    Raises:
        CheckpointError: as `labels_in_file`, or the labels of `id2label` are numbers.
    """
    value = fields[key]
    where = f"{where}: {key}"
    if key == "id2label" and isinstance(value, dict):
        number = next((label for label in value.values() if isinstance(label, int)), None)
        # Numbers do not tell labels from indices.
        if number is not None and all(map(_is_index, value)):
            raise CheckpointError(f"{where}: {number}: a label must be text, in quotes")
    return labels_in_value(value, where)


def _bare(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the labels of lines without the decoration that all of them have."""
    for decoration in _DECORATIONS:
        matches = list(map(decoration.fullmatch, lines))
        if all(matches):
            return tuple(match[1] for match in matches if match)
    return tuple(lines)


def _labels_in_numbered_lines(lines: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the labels of lines that all have an index; empty for other lines.

    Raises:
        CheckpointError: the numbers look like indices, but one is missing or given twice.
    """
    sides = [pairs for pattern in _NUMBERED if (pairs := _numbered(lines, pattern))]
    counted = range(len(lines))
    for pairs in sides:
        labels = dict(pairs)
        if labels.keys() == set(counted):
            return _bare([labels[index] for index in counted])
    is_clear = all(map(_CLEAR.fullmatch, lines))
    for pairs in sides:
        if not is_clear and min(pairs)[0] > 1:
            continue  # because `2 stroke` and `4 cylinders` are labels
        try:
            return _in_order(((f"line {n}", *pair) for n, pair in enumerate(pairs, 1)), where)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; if the numbers belong to the labels, write each label in quotes"
            ) from None
    return ()


def _numbered(lines: Sequence[str], pattern: re.Pattern[str]) -> list[tuple[int, str]]:
    """Return index and label of each line; empty if a line lacks one, or all labels are equal.

    The numbers of `type 1` and `type 2` are parts of labels.
    """
    matches = [match for line in lines if (match := pattern.fullmatch(line))]
    if len(matches) < len(lines) or len({match["label"] for match in matches}) < 2:
        return []
    return [(int(match["index"]), match["label"]) for match in matches]


def _labels_in_table(lines: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the labels of a CSV table, with or without a header, its columns in any order."""
    rows = _table_rows(lines, where)
    names = [cell.lower().replace(" ", "_") for cell in rows[0][1]]
    known_names = {*_INDEX_NAMES, *_LABEL_NAMES}
    is_headed = not any(map(_is_index, names)) and not known_names.isdisjoint(names)
    if is_headed:
        rows = rows[1:]
    else:
        names = []
    if not rows:
        raise CheckpointError(f"{where}: a header without labels")
    width = len(rows[0][1])
    if width == 1:
        numbered = ((f"line {line}", index, cells[0]) for index, (line, cells) in enumerate(rows))
        return _in_order(numbered, where)
    numeric = [
        column for column in range(width) if all(_is_index(cells[column]) for _, cells in rows)
    ]
    index = _column(numeric, names, _INDEX_NAMES)
    others = [column for column in range(width) if column != index]
    label = _column(others, names, _LABEL_NAMES)
    if index is None or label is None:
        raise CheckpointError(
            f"{where}: its {width} columns do not tell which are index and label; expected {FORMS}"
        )
    return _in_order(((f"line {line}", cells[index], cells[label]) for line, cells in rows), where)


def _table_rows(lines: Sequence[str], where: str) -> list[tuple[int, list[str]]]:
    """Return the rows of a CSV table with their line numbers, all of the same length."""
    delimiter = max("\t;,", key=lines[0].count)
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


def _labels_in_list(values: Sequence[Any], where: str) -> tuple[str, ...]:
    """Return the labels of a list of texts, or of objects such as COCO's `categories`."""
    rows: list[Row] = []
    for position, value in enumerate(values):
        fields = value if isinstance(value, dict) else _fields_of(value)
        index = next((fields[key] for key in _INDEX_NAMES if key in fields), position)
        label = next((fields[key] for key in _LABEL_NAMES if key in fields), None)
        rows.append((f"entry {position}", index, label))
    return _in_order(rows, where)


def _fields_of(value: Any) -> dict[str, Any]:
    """Return the label of an entry, with its index if the entry is a pair of both."""
    if not isinstance(value, list) or not value or len(value) > 2:
        return {"label": value}
    first = value[0]
    last = value[-1]
    if len(value) == 2 and _is_index(first) and not _is_index(last):
        return {"index": first, "label": last}
    if len(value) == 2 and _is_index(last):
        return {"index": last, "label": first}
    return {"label": last}


def require_agreement(labels: Sequence[str], label2id: object, where: str) -> None:
    """Refuse a `label2id` that contradicts the labels of `id2label`.

    Names that transformers makes up are not compared.
    """
    if not isinstance(label2id, dict):
        return
    indices = {
        label.strip(): index for label, index in label2id.items() if not UNNAMED.fullmatch(label)
    }
    by_index = {str(index): label for index, label in enumerate(labels)}
    for label, index in indices.items():
        other = by_index.get(str(index), "no class")
        if other != label and not UNNAMED.fullmatch(other):
            raise CheckpointError(
                f"{where}: label2id has {label!r:.100} at {index!r:.100}, where id2label has "
                f"{other!r:.100}: correct the wrong one, or {NAME_THEM}"
            )
    for label in labels if indices else ():
        if label not in indices and not UNNAMED.fullmatch(label):
            raise CheckpointError(
                f"{where}: label2id lacks {label!r:.100} of id2label: correct the wrong one, or "
                f"{NAME_THEM}"
            )


def _is_index(value: object) -> bool:
    """Return whether a value is a number that can count classes."""
    if isinstance(value, str):
        return value.isascii() and value.isdigit() and len(value) < 10
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9


def _without_synset(label: object) -> object:
    """Return the label of an entry; Keras writes `["n01440764", "tench"]`."""
    if isinstance(label, list) and len(label) == 2:
        return label[1]
    return label


def _in_order(rows: Iterable[Row], where: str) -> tuple[str, ...]:
    """Return the labels of rows in the order of their indices, each of 0...N-1 once."""
    labels: dict[int, str] = {}
    for position, index, label in rows:
        if not isinstance(label, str) or not label.strip():
            raise CheckpointError(
                f"{where}: {position}: {label!r:.100}: a label must be text that is not empty"
            )
        if not _is_index(index):
            raise CheckpointError(
                f"{where}: {position}: {index!r:.100}: expected the index of a class"
            )
        number = int(str(index))
        if number in labels:
            raise CheckpointError(
                f"{where}: {position}: index {number} is {labels[number]!r:.100} and "
                f"{label!r:.100}; give each index once"
            )
        labels[number] = label.strip()
    missing = next((number for number in range(len(labels)) if number not in labels), None)
    if missing is not None:
        hint = "; count from 0" if missing == 0 else ""
        raise CheckpointError(
            f"{where}: no label for index {missing}: its {len(labels)} labels have the indices "
            f"{min(labels)} to {max(labels)}, expected 0...{len(labels) - 1}{hint}"
        )
    return tuple(labels[number] for number in range(len(labels)))
