"""Labels that a setting names or lists: a preset, a file in one of `label_forms`, or the labels."""

import json
import re
from importlib import resources
from pathlib import Path
from typing import Final

from model.checkpoint.label_forms import (
    LINE_SUFFIXES,
    MAX_LABELS,
    is_document,
    labels_in_file,
)
from model.checkpoint.local_files import read_text_file, resolved_source
from model.errors import CheckpointError, InputError
from model.label_texts import hidden_character, parse_labels

# `imagenet-1k`: the 1,000 classes of ILSVRC 2012 in their usual order; `numbers`: the index of each
# class.
LABEL_PRESETS: Final = ("imagenet-1k", "numbers")
_OBJECT_FILES: Final = (".npy", ".npz", ".pkl", ".pickle", ".joblib", ".pt", ".pth")
_TUPLE: Final = re.compile(r"^\s*\(([^()]*)\)\s*$")  # as Python prints it
_FILE: Final = re.compile(r"[^\"'\[{]*\.(txt|json|csv|tsv|ya?ml|names|labels)", re.IGNORECASE)


def read_labels(name: str, classes: int | None) -> tuple[str, ...]:
    """Return the labels that a setting names or lists.

    The first of these decides: a preset, JSON or a Python literal, an existing file, commas.

    Args:
        name: one of `LABEL_PRESETS`, a file, or the labels themselves: `cat,dog`, `["cat", "dog"]`.
        classes: number of labels; None allows any number.

    Raises:
        CheckpointError: the file does not exist, its form is not read, an index is missing or given
            twice, a character is hidden, or there are not exactly `classes` labels.
    """
    if name == "numbers" and classes is not None:
        return tuple(str(index) for index in range(classes))
    path = Path(name).expanduser()
    where = "VIT_LABELS"
    if name == "imagenet-1k":
        labels = imagenet_labels()
    elif is_document(name) or resolved_source(path, str(path)) is None:
        labels = _listed(name, where)
    else:
        where = str(path)
        if path.suffix.lower() in _OBJECT_FILES:
            raise CheckpointError(
                f"{where}: an object of Python or NumPy is not read as labels: save it as text, "
                "Path('labels.json').write_text(json.dumps(list(map(str, labels))))"
            )
        labels = _in_file(read_text_file(path, where), where, path.suffix.lower(), classes)
    for label in labels:
        hidden = hidden_character(label)
        if hidden:
            raise CheckpointError(
                f"{where}: {label!r:.100} has {hidden}, which does not print: remove it"
            )
    if classes not in (None, len(labels)):
        raise CheckpointError(
            f"{where}: {len(labels)} labels for {classes} classes: give one for each class, in the "
            "order of the head's rows"
        )
    return labels


def imagenet_labels() -> tuple[str, ...]:
    """Return the 1,000 descriptions of ILSVRC 2012, in the order of their WordNet ids."""
    file = resources.files("model.checkpoint").joinpath("imagenet_1k.txt")
    return tuple(file.read_text(encoding="utf-8").splitlines())


def _in_file(text: str, where: str, suffix: str, classes: int | None) -> tuple[str, ...]:
    """Return the labels in a file; a text file may also list them as the setting does."""
    is_text = suffix in LINE_SUFFIXES and not is_document(text)
    is_one_line = len(text.rstrip().splitlines()) == 1
    if is_text and is_one_line and classes != 1 and "," in text:
        return _listed(text.strip(), where)
    return labels_in_file(text, where, suffix)


def _listed(text: str, where: str) -> tuple[str, ...]:
    """Return the labels that a setting lists."""
    if is_document(text):
        return labels_in_file(text, where, "")
    text = _TUPLE.sub(r"\1", text)
    if "," not in text or _FILE.fullmatch(text):
        raise CheckpointError(
            f"{where} {text!r:.200}: neither a file, nor names like cat,dog, nor one of "
            f"{', '.join(LABEL_PRESETS)}; one name alone is written as "
            f"{json.dumps([text.strip()[:50]], ensure_ascii=False)}"
        )
    try:
        labels = parse_labels(text, where, most=MAX_LABELS)
    except InputError as error:
        raise CheckpointError(str(error)) from None
    if '"' in text:
        return labels
    # Unquoted labels may have indices, as lines of a file: `0:cat,1:dog`.
    return labels_in_file("\n".join(labels), where, "")
