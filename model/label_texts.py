"""Labels as callers and settings write them: comma-separated, or as a JSON array."""

import csv
import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from model.config import NetworkConfig
from model.errors import InputError
from model.heads import ZeroShot
from model.parameters import require_classes

# Most characters of a label, a text or a template.
MAX_CHARACTERS: Final = 256

# Most texts of one request: labels times templates.
MAX_TEXTS: Final = 1000

# Longest JSON escape of one character.
_JSON_CHARACTERS: Final = 12

# Commas that a list may have on average per label if some labels are quoted.
_COMMAS: Final = 32

# Control characters, line separators, bidirectional overrides, lone surrogates, and U+FFFD, the
# replacement of bytes that were not UTF-8.
CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffd]")

# Arabic and Indic scripts, in which the joiners U+200C and U+200D are legitimate.
_SCRIPTS: Final = (
    "\u0600-\u109f\u1700-\u18af\u1900-\u1c7f\u1cd0-\u1cff\ua800-\uabff"
    "\ufb50-\ufdff\ufe70-\ufefc\U00010a00-\U00011fff\U0001e900-\U0001e95f"
)
# Scripts without spaces between words, where U+200B parts words: Thai, Lao, Myanmar, Khmer, Tai.
_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\ua9e0-\ua9ff\uaa60-\uaadf"
)
_VIRAMAS: Final = "\u094d\u09cd\u0a4d\u0acd\u0b4d\u0bcd\u0c4d\u0ccd\u0d4d\u0dca"
_EMOJI: Final = "\u2190-\u2bff\U0001f000-\U0001faff"

# Format characters (category Cf) that change nothing that a reader sees. Excluded are characters
# with a visible sign, and joiners within words, emoji and flags.
# The class comes first, so that `re` looks around its characters only, not around all.
_HIDDEN: Final = re.compile(
    "[\xad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
    f"(?!(?<=[{_SCRIPTS}][\u200c\u200d])[{_SCRIPTS}]|(?<=[{_VIRAMAS}]\u200d)"
    f"|(?<=[{_UNSPACED}]\u200b)[{_UNSPACED}]"
    f"|(?<=[{_EMOJI}\ufe0f]\u200d)[{_EMOJI}]"
    "|(?<=[\U0001f3f4\U000e0020-\U000e007e][\U000e0020-\U000e007f]))"
)

# First characters of a formula, also in double width.
_FORMULA_STARTS: Final = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")

# Categories of characters that are invisible on their own.
_INVISIBLE: Final = {"Cf", "Mn", "Zs"}


def labels_of_request(
    text: object, zero_shot: ZeroShot | None, config: NetworkConfig
) -> tuple[str, ...]:
    """Return the labels that a caller gives instead of the model's classes; empty for None.

    Raises:
        InputError: as `parse_labels`; or the model has neither classes nor labels from the caller;
            or it has no text tower.
    """
    if text is None:
        if zero_shot is not None and not config.num_classes:
            raise InputError(
                "labels",
                "labels: the model has none: send labels=cat,dog, or start it with VIT_LABELS",
            )
        require_classes(config)
        return ()
    if zero_shot is None:
        raise InputError(
            "labels",
            "labels: the model has its own classes, and no text tower to compare other labels with",
        )
    if not isinstance(text, str):
        raise InputError("labels", "labels: expected a text of names, or of a JSON array")
    return parse_labels(text, most=max(1, MAX_TEXTS // len(zero_shot.templates)))


def with_labels(config: NetworkConfig, labels: Sequence[str]) -> NetworkConfig:
    """Return the architecture with one class per label of a request; unchanged without labels."""
    if not labels:
        return config
    return config.model_copy(update={"num_classes": len(labels)})


def parse_labels(text: str, name: str = "labels", *, most: int = MAX_TEXTS) -> tuple[str, ...]:
    """Return the labels in a comma-separated list, with quotes as in CSV, or in a JSON array.

    Raises:
        InputError: the list is empty, malformed or longer than `most`; or a label is empty, too
            long or not printable.
    """
    # Check both limits before parsing could cut the text into millions of pieces.
    if len(text) > most * (_JSON_CHARACTERS * MAX_CHARACTERS + len('"",')):
        raise InputError(
            name, f"{name}: {len(text)} characters, more than {most} names of {MAX_CHARACTERS} take"
        )
    commas_per_name = _COMMAS if '"' in text else 2
    if text.count(",") > most * commas_per_name:
        raise InputError(name, f"{name}: too many names; at most {most}")
    try:
        if text.lstrip().startswith("["):
            values = json.loads(text)
        else:
            values = next(csv.reader([text.strip()], skipinitialspace=True, strict=True), [])
    except (ValueError, RecursionError, csv.Error):
        raise InputError(
            name, f'{name}: expected names like cat,dog,"a red car", or a JSON array of them'
        ) from None
    return checked_texts(values, name, most)


def checked_texts(
    values: Sequence[object], name: str, most: int, *, allows_hidden: bool = False
) -> tuple[str, ...]:
    """Return texts without surrounding spaces; raise `InputError` as `parse_labels`.

    Args:
        values: the texts.
        name: name of the parameter in messages.
        most: largest number of texts.
        allows_hidden: whether a text may have characters of `hidden_character`.
    """
    texts = [value.strip() if isinstance(value, str) else "" for value in values]
    if not 1 <= len(texts) <= most:
        raise InputError(name, f"{name}: there are {len(texts)}, expected 1 to {most}")
    for number, text in enumerate(texts, start=1):
        hidden = hidden_character(text[:MAX_CHARACTERS])
        if not is_visible(text) or (hidden and not allows_hidden):
            remedy = f": remove {hidden}" if hidden else ""
            raise InputError(
                name,
                f"{name}: {text!r:.50}, number {number}: expected 1 to {MAX_CHARACTERS} "
                f"characters that print{remedy}",
            )
    return tuple(texts)


def hidden_character(text: str) -> str:
    """Return the first character of a label that a reader does not see: `U+200B`; empty if none."""
    match = _HIDDEN.search(text)
    return f"U+{ord(match[0]):04X}" if match else ""


def without_hidden(text: str) -> str:
    """Return a label without the characters that a reader does not see."""
    return _HIDDEN.sub("", text)


def is_visible(text: str) -> bool:
    """Return whether a text has 1 to `MAX_CHARACTERS` characters, and some of them are visible."""
    if len(text) > MAX_CHARACTERS or CONTROL.search(text):
        return False
    return not _INVISIBLE.issuperset(map(unicodedata.category, text))


def folded(label: str) -> str:
    """Return the form that labels have in common if they differ only by case or spaces."""
    return " ".join(label.split()).casefold()


def table_cell(value: object) -> object:
    """Return a cell for a CSV table: a spreadsheet shows a text and does not run it as a formula.

    See OWASP, CSV injection. Numbers stay as they are.
    """
    if isinstance(value, str | Path) and str(value).startswith(_FORMULA_STARTS):
        return f"'{value}"
    return value


def checked_label(text: str) -> str:
    """Return the label of an example in NFC, without surrounding spaces; raise `InputError`."""
    [label] = checked_texts([unicodedata.normalize("NFC", text)], "label", 1)
    return label
