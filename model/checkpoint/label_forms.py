"""The forms of labels in files of the core: one label a line, and JSON.

JSON is from index to label (`id2label`, Keras' `imagenet_class_index.json`), from label to index
(`class_to_idx`), or a list. Extensions read other forms; see `LabelReader`.

Indices are checked: each of 0...N-1 once.
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

from model.checkpoint.local_files import parsed_json
from model.errors import CheckpointError
from model.extension import extensions, naming, resolve
from model.images.listing import PICTURE_SUFFIXES

# A label reader returns the labels in the text of a file, or None if it does not read this form.
# It takes the arguments of `labels_in_file`.
LabelReader = Callable[[str, str, str], tuple[str, ...] | None]

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
# Keys of an object that hold the number of its labels.
_COUNTS: Final = ("nc", "num_classes", "num_labels", "n_classes")
# Keys and headings of an index, and of a label, in order of preference.
INDEX_NAMES: Final = (
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
LABEL_NAMES: Final = (
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

# A name that transformers makes up for a class without a name.
UNNAMED: Final = re.compile(r"LABEL_\d+")

# Most labels of a file with one label a line, or of a list in a setting.
MAX_LABELS: Final = 100_000

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
    if suffix == ".json" and not _is_json(text) and _is_python(text):
        suffix = ".txt"
    is_listed = suffix in LINE_SUFFIXES and is_document(text)
    if suffix == ".json" or (is_listed and _is_json(text)):
        return labels_in_value(parsed_json(text, where), where)
    for extension in extensions():
        for name in extension.label_readers:
            reader: LabelReader = resolve(name, extension)
            with naming(extension, "label_readers"):
                labels = reader(text, where, suffix)
                if not isinstance(labels, tuple | None):
                    raise TypeError(f"{name} returned {type(labels).__name__}, see `LabelReader`")
            if labels is not None:
                return labels
    if suffix not in LINE_SUFFIXES:
        raise CheckpointError(f"{where}: a file {suffix} is not read as labels; expected {FORMS}")
    if is_listed:
        return labels_in_value(parsed_json(text, where), where)
    return label_lines(text, where)


def is_document(text: str) -> bool:
    """Return whether a text begins like JSON or a Python literal."""
    return text.lstrip().startswith(("{", "["))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_python(text: str) -> bool:
    """Return whether a text is a list or a dictionary as Python prints it."""
    try:
        return isinstance(ast.literal_eval(text), list | dict)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False


def lines_of(text: str, where: str) -> list[str]:
    """Return the lines of a text, which end as on Linux, Windows or old Macs; refuse too many."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").rstrip()
    count = text.count("\n")
    if count > MAX_LABELS:
        raise CheckpointError(
            f"{where}: {count + 1} lines, but at most {MAX_LABELS} labels are read: give a file "
            "with one label for each class"
        )
    return text.split("\n")


def label_lines(text: str, where: str) -> tuple[str, ...]:
    """Return the label in each line; refuse an empty line, or the name of a picture."""
    lines = tuple(line.strip() for line in lines_of(text, where))
    if "" in lines:
        raise CheckpointError(
            f"{where}: line {lines.index('') + 1} is empty; expected one label a line"
        )
    for number, line in enumerate(lines, 1):
        _refuse_picture(line, f"line {number}", where)
    return lines


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
        if holders[0] == "label_names":
            labels = described(labels, value.get("label_descriptions"), where)
        if holders[0] == "id2label" and "label2id" in holders:
            require_agreement(labels, value["label2id"], where)
        return _counted(labels, value, where)
    if all(map(is_index, value)) and not all(isinstance(label, int) for label in value.values()):
        return _labels_by_index(value, where)
    if all(map(is_index, value.values())):
        rows = ((repr(label)[:100], index, label) for label, index in value.items())
        return in_order(rows, where)
    if len(nested) == 1:
        return _counted(labels_in_holder(value, nested[0], where), value, where)
    raise CheckpointError(
        f"{where}: an object, but neither from index to label nor from label to index; expected "
        f"{FORMS}"
    )


def _labels_by_index(entries: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return the labels of an object from index to label, or to an object with the label."""
    rows = [_row(repr(index)[:100], index, entry) for index, entry in entries.items()]
    for (position, index, _), key in zip(rows, entries, strict=True):
        if str(index) != key:
            raise CheckpointError(
                f"{where}: {position}: its entry has the index {index!r:.100}: correct the wrong "
                "one"
            )
    return in_order(rows, where)


def _counted(labels: tuple[str, ...], fields: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return labels; refuse them if another field states a different number of labels."""
    for key in _COUNTS:
        count = fields.get(key)
        if is_index(count) and int(str(count)) != len(labels):
            raise CheckpointError(
                f"{where}: {key} is {count}, but there are {len(labels)} labels: correct the wrong "
                f"one; without {key} the labels count"
            )
    return labels


def labels_in_holder(fields: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Return the labels in a field of an object.

    Raises:
        CheckpointError: as `labels_in_file`, or the labels of `id2label` are numbers.
    """
    value = fields[key]
    where = f"{where}: {key}"
    if key == "id2label" and isinstance(value, dict):
        number = next((label for label in value.values() if isinstance(label, int)), None)
        # Numbers do not tell labels from indices.
        if number is not None and all(map(is_index, value)):
            raise CheckpointError(f"{where}: {number}: a label must be text, in quotes")
    return labels_in_value(value, where)


def described(names: Sequence[str], texts: object, where: str) -> tuple[str, ...]:
    """Return timm's `label_names`, described by its `label_descriptions`."""
    texts = texts or {}
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise CheckpointError(f"{where}: label_descriptions: expected an object from name to text")
    return tuple(texts.get(name, name) for name in names)


def _labels_in_list(values: Sequence[Any], where: str) -> tuple[str, ...]:
    """Return the labels of a list of texts, or of objects such as COCO's `categories`."""
    rows: list[Row] = []
    for position, value in enumerate(values):
        if "dtype" in _fields_of(value):
            raise CheckpointError(
                f"{where}: lists the columns of a data set, not labels: give the names of its "
                "class_label alone"
            )
        rows.append(_row(f"entry {position}", position, value))
    return in_order(rows, where)


def _row(position: str, index: object, entry: Any) -> Row:
    """Return the row of an entry, such as Keras' `["n01440764", "tench"]`, or an object.

    Args:
        position: position of the entry in messages.
        index: index of the entry if it does not state one.
        entry: label, with or without an index.
    """
    fields = _fields_of(entry)
    index = next((fields[key] for key in INDEX_NAMES if key in fields), index)
    return position, index, next((fields[key] for key in LABEL_NAMES if key in fields), None)


def _fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of an object; for other entries `label`, and `index` if there is one."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, list) or not value or len(value) > 2:
        return {"label": value}
    first = value[0]
    last = value[-1]
    if len(value) == 2 and is_index(first) and not is_index(last):
        return {"index": first, "label": last}
    if len(value) == 2 and is_index(last):
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


def is_index(value: object) -> bool:
    """Return whether a value is a number that can count classes."""
    if isinstance(value, str):
        return value.isascii() and value.isdigit() and len(value) < 10
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9


def _refuse_picture(label: str, position: str, where: str) -> None:
    """Refuse the name of a picture, which a list of pictures with their classes holds."""
    if PurePath(label).suffix.lower() in PICTURE_SUFFIXES:
        raise CheckpointError(
            f"{where}: {position}: {label!r:.100} is a picture, not a label: give a file with one "
            "label for each class, in place of a list of pictures"
        )


def in_order(rows: Iterable[Row], where: str) -> tuple[str, ...]:
    """Return the labels of rows in the order of their indices, each of 0...N-1 once."""
    labels: dict[int, str] = {}
    for position, index, label in rows:
        if not isinstance(label, str) or not label.strip():
            raise CheckpointError(
                f"{where}: {position}: {label!r:.100}: a label must be text that is not empty"
            )
        if not is_index(index):
            raise CheckpointError(
                f"{where}: {position}: {index!r:.100}: expected the index of a class"
            )
        _refuse_picture(label, position, where)
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
