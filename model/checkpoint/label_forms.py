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
# An index before a label, as Teachable Machine writes it: `0 cat`, `0: cat`.
_NUMBERED: Final = re.compile(r"(\d{1,9})(?:\s*[:,;\t]\s*|\s+)(\S.*)")

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
    if suffix in (".json", ".yaml", ".yml") or text.lstrip().startswith(("{", "[")):
        return labels_in_value(parsed(text, where, suffix), where)
    lines = text.replace("\r\n", "\n").replace("\r", "\n").rstrip().split("\n")
    if suffix in (".csv", ".tsv"):
        return _labels_in_table(lines, where)
    empty = next((number for number, line in enumerate(lines, 1) if not line.strip()), None)
    if empty is not None:
        raise CheckpointError(f"{where}: line {empty} is empty; expected one label a line")
    return _labels_in_numbered_lines(lines, where) or tuple(line.strip() for line in lines)


def labels_in_json(text: str, where: str) -> tuple[str, ...]:
    """Return the labels in a JSON value; raise `CheckpointError` as `labels_in_file`."""
    return labels_in_value(parsed_json(text, where), where)


def labels_in_value(value: Any, where: str) -> tuple[str, ...]:
    """Return the labels in a value of JSON or YAML; raise errors as `labels_in_file`."""
    if isinstance(value, list) and value:
        return _labels_in_list(value, where)
    if not isinstance(value, dict) or not value:
        raise CheckpointError(f"{where}: holds no labels; expected {FORMS}")
    holders = [key for key in _HOLDERS if isinstance(value.get(key), list | dict) and value[key]]
    if holders:
        labels = labels_in_value(value[holders[0]], f"{where}: {holders[0]}")
        if holders[0] == "id2label" and "label2id" in holders:
            _require_agreement(labels, value["label2id"], where)
        return labels
    if all(map(_is_index, value)) and not all(isinstance(label, int) for label in value.values()):
        names = {key: _without_synset(label) for key, label in value.items()}
        return indexed_labels(names, len(value), where)
    if all(map(_is_index, value.values())):
        rows = ((repr(label)[:100], index, label) for label, index in value.items())
        return _in_order(rows, where)
    raise CheckpointError(
        f"{where}: an object, but neither from index to label nor from label to index"
    )


def indexed_labels(mapping: Mapping[str, Any], classes: int, where: str) -> tuple[str, ...]:
    """Return the labels of an object from index to label, such as transformers' `id2label`.

    Raises:
        CheckpointError: an index is missing, unknown or not a number, or a label is not a text.
    """
    for key, label in mapping.items():
        if not isinstance(label, str):
            raise CheckpointError(
                f"{where}: {key!r:.100}: {label!r:.100}: a label must be text, in quotes"
            )
        if not _is_index(key):
            raise CheckpointError(
                f"{where}: {key!r:.100}: {label!r:.100}: expected a class index and its label"
            )
    indices = [str(index) for index in range(classes)]
    if mapping.keys() != set(indices):
        raise CheckpointError(
            f"{where}: {len(mapping)} labels, expected one for each of 0...{classes - 1}: correct "
            "it, or name the labels with --labels FILE (VIT_LABELS)"
        )
    return tuple(mapping[index] for index in indices)


def _labels_in_numbered_lines(lines: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the labels of lines that all begin with an index; empty for other lines."""
    matches = [match for line in lines if (match := _NUMBERED.fullmatch(line.strip()))]
    if len(matches) < len(lines) or len(lines) < 2:
        return ()
    numbers = sorted(int(match[1]) for match in matches)
    is_counted = numbers in (list(range(len(lines))), list(range(1, len(lines) + 1)))
    if not is_counted and not all(re.match(r"\d+\s*[:,;\t]", match[0]) for match in matches):
        return ()  # because `2 stroke` and `4 stroke` are labels
    rows = ((f"line {number}", match[1], match[2]) for number, match in enumerate(matches, 1))
    return _in_order(rows, where)


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
        fields = value if isinstance(value, dict) else {"label": value}
        index = next((fields[key] for key in _INDEX_NAMES if key in fields), position)
        label = next((fields[key] for key in _LABEL_NAMES if key in fields), None)
        rows.append((f"entry {position}", index, label))
    return _in_order(rows, where)


def _require_agreement(labels: Sequence[str], label2id: Any, where: str) -> None:
    """Refuse a `label2id` that contradicts `id2label`; made-up names are not compared."""
    if not isinstance(label2id, dict):
        return
    id2label = {str(index): label for index, label in enumerate(labels)}
    for label, index in label2id.items():
        other = id2label.get(str(index))
        is_made_up = UNNAMED.fullmatch(label) or UNNAMED.fullmatch(other or "")
        if not is_made_up and other != label.strip():
            raise CheckpointError(
                f"{where}: label2id has {label!r:.100} at {index!r:.100}, where id2label has "
                f"{other or 'no class'!r:.100}: correct the wrong one"
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
