"""Labels in every form that libraries and people write them in: one reader for settings, files and
configs.

A text with one label a line; a list as in CSV or JSON; JSON from index to label (`id2label`, Keras'
`imagenet_class_index.json`) or from label to index (`class_to_idx`); a CSV table with a column of
indices; and the `names` of a YAML file. What a form says of indices is checked: each of 0...N-1
once.
"""

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from model.checkpoint.local_files import read_text_file, reading, resolved_source
from model.errors import CheckpointError, InputError
from model.label_texts import is_list, parse_labels

# `imagenet-1k`: the 1,000 classes of ILSVRC 2012 in their usual order; `numbers`: each class's
# index.
LABEL_PRESETS: Final = ("imagenet-1k", "numbers")
_FORMS: Final = (
    "one label a line, a list or an object of JSON, a CSV table of index and label, or names: in YAML "
    "(docs/checkpoints.md#statistics-and-labels-for-formats-that-carry-none)"
)
_FILE: Final = re.compile(r"[^\"'\[{]*\.(txt|json|csv|tsv|ya?ml|names|labels)", re.IGNORECASE)
_MOST_NAMES: Final = 100_000
# PyYAML reads about a megabyte a second.
_MAX_YAML_CHARACTERS: Final = 1 << 20
# Keys of an object that hold its labels, the first of them that is there.
_HOLDERS: Final = (
    *(
        "id2label",
        "label2id",
        "class_to_idx",
        "idx_to_class",
        "label_names",
        "labels",
        "names",
        "class_names",
    ),
    *("classes", "categories"),
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

# The place of a label in a file, its index as it is written there, and the label.
Row = tuple[str, object, object]


def read_labels(name: str, classes: int | None) -> tuple[str, ...]:
    """Return the labels that a setting names or lists.

    Args:
        name: one of `LABEL_PRESETS`, a file, or the labels themselves: `cat,dog`, `["cat", "dog"]`.
        classes: their number; None where any number is allowed.

    Raises:
        CheckpointError: there is no such file, no form that is read, an index that is missing or
            given twice, or not exactly `classes` labels.
    """
    if name == "numbers" and classes is not None:
        return tuple(str(index) for index in range(classes))
    path, where = Path(name).expanduser(), "VIT_LABELS"
    if name == "imagenet-1k":
        labels = imagenet_labels()
    elif name.lstrip().startswith(("[", "{")) or resolved_source(path, str(path)) is None:
        labels = _listed(name, where)
    else:
        where = str(path)
        labels = labels_in_text(read_text_file(path, where), where, path.suffix.lower(), classes)
    if classes not in (None, len(labels)):
        raise CheckpointError(f"{where}: {len(labels)} labels for {classes} classes")
    return labels


def _listed(text: str, where: str) -> tuple[str, ...]:
    """Return the labels that a setting lists."""
    if text.lstrip().startswith("{"):
        return _of_value(_json(text, where), where)
    if not is_list(text) or _FILE.fullmatch(text):
        raise CheckpointError(
            f"{where} {text!r:.200}: neither a file, nor names like cat,dog, nor one of {', '.join(LABEL_PRESETS)}"
        )
    try:
        return parse_labels(text, where, most=_MOST_NAMES)
    except InputError as error:
        raise CheckpointError(str(error)) from None


def labels_in_text(text: str, where: str, suffix: str, classes: int | None) -> tuple[str, ...]:
    """Return the labels in the text of a file.

    Args:
        text: of the file, without a byte order mark.
        where: what messages call the file.
        suffix: of its name, in lower case.
        classes: their number, where it is known.

    Raises:
        CheckpointError: as `read_labels`, with the line.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").rstrip().split("\n")
    if not text.strip():
        raise CheckpointError(f"{where}: holds no labels; expected {_FORMS}")
    if suffix in (".json", ".yaml", ".yml") or text.lstrip().startswith(("{", "[")):
        return _of_value(_parsed(text, where, suffix), where)
    if suffix in (".csv", ".tsv"):
        return _of_table(lines, where)
    if len(lines) == 1 and classes != 1 and is_list(text):
        return _listed(text.strip(), where)
    empty = next((number for number, line in enumerate(lines, 1) if not line.strip()), None)
    if empty is not None:
        raise CheckpointError(f"{where}: line {empty} is empty; expected one label a line")
    return _numbered(lines, where) or tuple(line.strip() for line in lines)


def _numbered(lines: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the labels of lines that all begin with their indices; none where they do not."""
    found = [match for line in lines if (match := _NUMBERED.fullmatch(line.strip()))]
    numbers = sorted(int(match[1]) for match in found)
    if len(found) < len(lines) or len(lines) < 2:
        return ()
    is_counted = numbers in (list(range(len(lines))), list(range(1, len(lines) + 1)))
    if not is_counted and not all(re.match(r"\d+\s*[:,;\t]", match[0]) for match in found):
        return ()  # `2 stroke` and `4 stroke` are labels
    return _indexed(
        ((f"line {number}", match[1], match[2]) for number, match in enumerate(found, 1)), where
    )


def _of_table(lines: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the labels of a CSV table, with or without a header, its columns in any order."""
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
    names = [cell.lower().replace(" ", "_") for cell in rows[0][1]]
    is_headed = not any(_is_index(name) for name in names) and not set(names).isdisjoint(
        (*_INDEX_NAMES, *_LABEL_NAMES)
    )
    body = rows[1:] if is_headed else rows
    if not body:
        raise CheckpointError(f"{where}: a header without labels")
    if width == 1:
        return _indexed(
            ((f"line {number}", place, row[0]) for place, (number, row) in enumerate(body)), where
        )
    numeric = [column for column in range(width) if all(_is_index(row[column]) for _, row in body)]
    index = _column(numeric, names if is_headed else [], _INDEX_NAMES)
    label = _column(
        [column for column in range(width) if column != index],
        names if is_headed else [],
        _LABEL_NAMES,
    )
    if index is None or label is None:
        raise CheckpointError(
            f"{where}: its {width} columns do not tell which are index and label; expected {_FORMS}"
        )
    return _indexed(((f"line {number}", row[index], row[label]) for number, row in body), where)


def _column(candidates: Sequence[int], names: Sequence[str], known: Sequence[str]) -> int | None:
    """Return the column with the first of the known names, else the only one, or of two without a
    header the first.
    """
    named = [column for name in known for column in candidates if names and names[column] == name]
    if named:
        return named[0]
    is_clear = len(candidates) == 1 or (len(candidates) == 2 and not names)
    return candidates[0] if is_clear else None


def _is_index(value: object) -> bool:
    """Return whether a value is a number that can count classes; one of many digits is not."""
    if isinstance(value, str):
        return value.isascii() and value.isdigit() and len(value) < 10
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9


def _of_value(value: Any, where: str) -> tuple[str, ...]:
    """Return the labels in a value of JSON or YAML."""
    if isinstance(value, list) and value:
        return _of_list(value, where)
    if not isinstance(value, dict) or not value:
        raise CheckpointError(f"{where}: holds no labels; expected {_FORMS}")
    held = {
        key: value[key]
        for key in _HOLDERS
        if isinstance(value.get(key), list | dict) and value[key]
    }
    if held:
        key, inner = next(iter(held.items()))
        labels = _of_value(inner, f"{where}: {key}")
        if key == "id2label":
            _require_agreement(labels, held.get("label2id"), where)
        return labels
    if all(map(_is_index, value)) and not all(isinstance(each, int) for each in value.values()):
        return indexed_labels(
            {key: _described(label) for key, label in value.items()}, len(value), where
        )
    if all(map(_is_index, value.values())):
        return _indexed(
            ((repr(label)[:100], index, label) for label, index in value.items()), where
        )
    raise CheckpointError(
        f"{where}: an object, but neither from index to label nor from label to index"
    )


def _require_agreement(labels: Sequence[str], indices: Any, where: str) -> None:
    """Refuse a `label2id` that contradicts `id2label`; the names that transformers makes up are not
    compared.
    """
    stated = {str(index): label for index, label in enumerate(labels)}
    for label, index in indices.items() if isinstance(indices, dict) else ():
        is_made_up = UNNAMED.fullmatch(label) or UNNAMED.fullmatch(stated.get(str(index), ""))
        if not is_made_up and stated.get(str(index)) != label.strip():
            raise CheckpointError(
                f"{where}: label2id has {label!r:.100} at {index!r:.100}, where id2label has "
                f"{stated.get(str(index), 'no class')!r:.100}: correct the wrong one"
            )


def _of_list(values: Sequence[Any], where: str) -> tuple[str, ...]:
    """Return the labels of a list: texts, or objects with an index and a label, as COCO's
    `categories`.
    """
    rows: list[Row] = []
    for place, value in enumerate(values):
        fields = value if isinstance(value, dict) else {"label": value}
        index = next((fields[key] for key in _INDEX_NAMES if key in fields), place)
        label = next((fields[key] for key in _LABEL_NAMES if key in fields), None)
        rows.append((f"entry {place}", index, label))
    return _indexed(rows, where)


def _described(label: object) -> object:
    """Return the label of an entry; Keras writes `["n01440764", "tench"]`."""
    if isinstance(label, list) and len(label) == 2:
        return label[1]
    return label


def _indexed(rows: Iterable[Row], where: str) -> tuple[str, ...]:
    """Return labels in the order of their indices, each of 0...N-1 once."""
    found: dict[int, str] = {}
    for place, index, label in rows:
        if not isinstance(label, str) or not label.strip():
            raise CheckpointError(
                f"{where}: {place}: {label!r:.100}: a label must be text that is not empty"
            )
        if not _is_index(index):
            raise CheckpointError(
                f"{where}: {place}: {index!r:.100}: expected the index of a class"
            )
        number = int(str(index))
        if number in found:
            raise CheckpointError(
                f"{where}: {place}: index {number} is {found[number]!r:.100} and {label!r:.100}; give each index once"
            )
        found[number] = label.strip()
    missing = next((number for number in range(len(found)) if number not in found), None)
    if missing is not None:
        hint = "; count from 0" if missing == 0 else ""
        raise CheckpointError(
            f"{where}: no label for index {missing}: its {len(found)} labels have the indices {min(found)} to "
            f"{max(found)}, expected 0...{len(found) - 1}{hint}"
        )
    return tuple(found[number] for number in range(len(found)))


def indexed_labels(mapping: Mapping[str, Any], classes: int, where: str) -> tuple[str, ...]:
    """Return the labels of an object from index to label, as transformers' `id2label`.

    Raises:
        CheckpointError: an index is missing, unknown or no number, or a label is no string.
    """
    expected = [str(index) for index in range(classes)]
    for key, label in mapping.items():
        if not isinstance(label, str):
            raise CheckpointError(
                f"{where}: {key!r:.100}: {label!r:.100}: a label must be text, in quotes"
            )
        if not _is_index(key):
            raise CheckpointError(
                f"{where}: {key!r:.100}: {label!r:.100}: expected a class index and its label"
            )
    if mapping.keys() != set(expected):
        raise CheckpointError(
            f"{where}: {len(mapping)} labels, expected one for each of 0...{classes - 1}"
        )
    return tuple(mapping[index] for index in expected)


def imagenet_labels() -> tuple[str, ...]:
    """Return the 1,000 descriptions of ILSVRC 2012, in the order of their WordNet ids."""
    text = (
        resources.files("model.checkpoint").joinpath("imagenet_1k.txt").read_text(encoding="utf-8")
    )
    return tuple(text.splitlines())


def _parsed(text: str, where: str, suffix: str) -> Any:
    """Return the value of a JSON or YAML file; a dictionary as Python prints it is YAML, too."""
    if suffix in (".yaml", ".yml"):
        return _yaml(text, where)
    try:
        return _json(text, where)
    except CheckpointError:
        if suffix == ".json":
            raise
    return _yaml(text, where)


def _json(text: str, where: str) -> Any:
    """Return a JSON value; refuse a key that stands twice, of which the standard library keeps the
    last.
    """
    with reading(where, "not JSON", ValueError, RecursionError):
        return json.loads(text, object_pairs_hook=lambda pairs: _object(pairs, where))


def _object(pairs: Sequence[tuple[str, Any]], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise CheckpointError(
                f"{where}: {key!r:.100} is there twice: {result[key]!r:.100} and {value!r:.100}"
            )
        result[key] = value
    return result


def _yaml(text: str, where: str) -> Any:
    """Return a YAML value whose numbers and words stay texts: `no` is a label, and not false."""
    try:
        import yaml  # noqa: PLC0415  optional: the Hub's client brings it
    except ImportError:
        raise CheckpointError(
            f"{where}: YAML needs PyYAML: pip install pyyaml, or write the labels as JSON"
        ) from None
    if len(text) > _MAX_YAML_CHARACTERS:
        raise CheckpointError(
            f"{where}: larger than {_MAX_YAML_CHARACTERS} characters of YAML; write it as JSON"
        )
    seen: set[int] = set()

    def value_of(node: Any) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return node.value
        if id(node) in seen:  # an alias of a few characters can stand for a value of any size
            raise CheckpointError(
                f"{where}: line {node.start_mark.line + 1}: write the values out instead of an alias"
            )
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            return [value_of(item) for item in node.value]
        pairs = [(str(value_of(key)), value_of(value)) for key, value in node.value]
        return _object(pairs, f"{where}: line {node.start_mark.line + 1}")

    with reading(where, "not YAML", yaml.YAMLError, ValueError, RecursionError):
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        return None if node is None else value_of(node)
