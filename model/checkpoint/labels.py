"""Labels of a checkpoint: the one reader of every form in which people have them.

    cat,dog,"red fox"                     names; also as a JSON array
    FILE                                  one a line; JSON; CSV; a data set's YAML
    imagenet-1k, numbers                  presets

JSON is a list, `id2label`, `label2id` or `class_to_idx`, Keras' class index (`{"0": ["n01440764", "tench"]}`), or an
object that holds one of these. CSV has an index and a label, in either order, with a header or without.
"""

import csv
import importlib.util
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from model.checkpoint.local_files import read_text_file, resolved_source
from model.errors import CheckpointError, InputError
from model.heads import is_list, parse_labels

# `imagenet-1k`: the 1,000 classes of ILSVRC 2012 in their usual order; `numbers`: each class's index.
LABEL_PRESETS: Final = ("imagenet-1k", "numbers")

# Labels of one setting that names them all.
_MOST_NAMES: Final = 100_000

# Keys under which an object holds labels, and the fields of one class in a list of objects.
_HOLDERS: Final = ("id2label", "label2id", "class_to_idx", "names", "labels", "classes", "categories")
_INDEX_NAMES: Final = frozenset({"index", "idx", "id", "class_id", "class_index", "label_id", "number", ""})
_LABEL_NAMES: Final = ("label", "name", "class_name", "label_name", "class", "description", "labels", "names")

_YAML_NAMES: Final = re.compile(r"^names\s*:", re.MULTILINE)


def read_labels(name: str, classes: int | None, setting: str = "VIT_LABELS") -> tuple[str, ...]:
    """Return the labels of a preset, of names or of a file.

    Args:
        name: see this module.
        classes: how many there must be; None for any number.
        setting: what messages call the source.

    Raises:
        CheckpointError: neither, a form that is not known, or another number of labels.
    """
    if name == "numbers" and classes is not None:
        return tuple(str(index) for index in range(classes))
    path = Path(name).expanduser()
    if name == "imagenet-1k":
        return _counted(imagenet_labels(), classes, name)
    if len(name) < 4096 and resolved_source(path, str(path)) is not None:
        return _counted(labels_in(read_text_file(path, str(path)), str(path)), classes, str(path))
    if not is_list(name):
        raise CheckpointError(
            f"{setting} {name!r:.200}: neither a file, nor names like cat,dog, nor one of {', '.join(LABEL_PRESETS)}"
        )
    try:
        return _counted(parse_labels(name, setting, most=_MOST_NAMES), classes, setting)
    except InputError as error:
        raise CheckpointError(str(error)) from None


def _counted(labels: tuple[str, ...], classes: int | None, where: str) -> tuple[str, ...]:
    if not labels or classes not in (None, len(labels)):
        raise CheckpointError(f"{where}: {len(labels)} labels for {classes or 'any'} classes")
    return labels


def labels_in(text: str, where: str) -> tuple[str, ...]:
    """Return the labels in the text of a file; raises `CheckpointError` of a form that is not known."""
    stripped = text.strip()
    if stripped.startswith(("{", "[")):
        try:
            return labels_of(json.loads(stripped), where)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{where}: not JSON: {error}") from None
    if _YAML_NAMES.search(stripped):
        return labels_of(_yaml(stripped, where), where)
    lines = stripped.splitlines()
    if Path(where).suffix.lower() in (".csv", ".tsv") or _is_table(lines):
        return _labels_of_table(stripped, where)
    return tuple(line.strip() for line in lines if line.strip())


def labels_of(value: Any, where: str) -> tuple[str, ...]:
    """Return the labels in a value of JSON or YAML.

    Raises:
        CheckpointError: it holds none, an index is missing or there twice, or a label is not text.
    """
    if isinstance(value, dict):
        held = [key for key in _HOLDERS if isinstance(value.get(key), (dict, list)) and value[key]]
        if held:
            return labels_of(value[held[0]], where)
        return _labels_of_object(value, where)
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return _indexed([_pair(each, place, where) for place, each in enumerate(value)], where)
    if not isinstance(value, list) or not all(isinstance(label, str) for label in value):
        raise CheckpointError(f"{where}: {_FORMS}")
    return tuple(value)


_FORMS: Final = (
    "no labels that are known: expected a list, an object from index to label or from label to index, "
    "lines, or a table with an index and a label"
)


def indexed_labels(mapping: Mapping[str, Any], classes: int, where: str) -> tuple[str, ...]:
    """Return the labels of an object from index to label, as transformers' `id2label`; raises as `labels_of`."""
    labels = _labels_of_object(mapping, where)
    if len(labels) != classes:
        raise CheckpointError(f"{where}: {len(labels)} labels, expected one for each of 0...{classes - 1}")
    return labels


def _labels_of_object(value: Mapping[Any, Any], where: str) -> tuple[str, ...]:
    """Return the labels of an object from index to label, or from label to index."""
    is_by_label = any(_number(str(key)) is None for key in value)
    if is_by_label and all(isinstance(index, int) and not isinstance(index, bool) for index in value.values()):
        return _indexed([(index, str(label)) for label, index in value.items()], where)
    pairs: list[tuple[int, str]] = []
    for key, named in value.items():
        index = _number(str(key))
        label = named[-1] if isinstance(named, list) and named else named
        if isinstance(label, dict):
            label = next((label[name] for name in _LABEL_NAMES if name in label), None)
        if not isinstance(label, str):
            raise CheckpointError(f"{where}: {key!r:.100}: {named!r:.100}: a label must be text, in quotes")
        if index is None:
            raise CheckpointError(f"{where}: {key!r:.100}: {named!r:.100}: expected a class index and its label")
        pairs.append((index, label))
    return _indexed(pairs, where)


def _pair(fields: Mapping[str, Any], place: int, where: str) -> tuple[int, str]:
    """Return index and label of a class that is an object, as `{"id": 0, "name": "cat"}`."""
    label = next((fields[name] for name in _LABEL_NAMES if isinstance(fields.get(name), str)), None)
    index = next((fields[name] for name in _INDEX_NAMES if isinstance(fields.get(name), int)), place)
    if label is None:
        raise CheckpointError(f"{where}: class {place} has no {' or '.join(_LABEL_NAMES[:2])}")
    return index, label


def _yaml(text: str, where: str) -> Any:
    if importlib.util.find_spec("yaml") is None:
        raise CheckpointError(
            f"{where}: YAML is read with PyYAML: pip install pyyaml, or give the names one a line in a text file"
        )
    import yaml  # noqa: PLC0415  optional

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not YAML: {' '.join(str(error).split())[:200]}") from None


def _is_table(lines: Sequence[str]) -> bool:
    """Return whether each line, perhaps but the first, is an index and a label with a comma, semicolon or tab."""
    rows = [re.split(r"[,;\t]", line) for line in lines if line.strip()]
    body = rows if len(rows) < 2 or any(_number(cell) is not None for cell in rows[0]) else rows[1:]
    if not body or any(len(row) < 2 for row in body):
        return False
    columns = ([_number(row[0]) for row in body], [_number(row[-1]) for row in body])
    return any(sorted(column, key=str) == sorted(range(len(body)), key=str) for column in columns)


def _labels_of_table(text: str, where: str) -> tuple[str, ...]:
    """Return the labels of a table with a column of indices and one of labels, or with one of labels alone."""
    delimiter = max("\t;,", key=text.partition("\n")[0].count)
    try:
        rows = [row for row in csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True) if row]
    except csv.Error as error:
        raise CheckpointError(f"{where}: not a table: {error}") from None
    header = [cell.strip().lower() for cell in rows[0]]
    has_header = all(_number(cell) is None for cell in header) and not _INDEX_NAMES.isdisjoint(header)
    has_header |= len(header) > 1 and not any(_number(cell) is not None for cell in header)
    has_header |= header[0] in _LABEL_NAMES
    body = rows[has_header:]
    if has_header:
        label = next((header.index(name) for name in _LABEL_NAMES if name in header), None)
        index = next((place for place, name in enumerate(header) if name in _INDEX_NAMES and place != label), None)
    elif len(header) == 1:
        return tuple(row[0].strip() for row in body)
    else:
        index = next((place for place, cell in enumerate(header) if _number(cell) is not None), None)
        label = next((place for place in range(len(header)) if place != index), None) if len(header) == 2 else None
    if label is None or any(len(row) <= max(label, index or 0) for row in body):
        raise CheckpointError(f"{where}: expected a table with the columns index and label")
    if index is None:
        return tuple(row[label].strip() for row in body)
    pairs = []
    for number, row in enumerate(body, 1 + has_header):
        place = _number(row[index])
        if place is None:
            raise CheckpointError(f"{where}: line {number}: {row[index]!r:.100}: expected the index of a class")
        pairs.append((place, row[label].strip()))
    return _indexed(pairs, where)


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _indexed(pairs: Iterable[tuple[int, str]], where: str) -> tuple[str, ...]:
    """Return labels in the order of their indices, which are 0...N-1, each once."""
    labels: dict[int, str] = {}
    for index, label in pairs:
        if index in labels:
            raise CheckpointError(f"{where}: class {index} has two labels: {labels[index]!r:.100} and {label!r:.100}")
        labels[index] = label
    missing = [index for index in range(len(labels)) if index not in labels]
    if missing:
        expected = f"expected one for each of 0...{len(labels) - 1}"
        raise CheckpointError(f"{where}: {len(labels)} labels, {expected}: class {missing[0]} has none")
    return tuple(labels[index] for index in range(len(labels)))


def imagenet_labels() -> tuple[str, ...]:
    """Return the 1,000 descriptions of ILSVRC 2012, in the order of their WordNet ids."""
    text = resources.files("model.checkpoint").joinpath("imagenet_1k.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines())
