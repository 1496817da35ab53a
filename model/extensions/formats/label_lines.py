"""Labels in lines with more than the label: an index, a WordNet id, quotes, comma or bullet."""

import re
from collections.abc import Sequence
from typing import Final

from model.checkpoint.label_forms import (
    LINE_SUFFIXES,
    Row,
    in_order,
    is_document,
    label_lines,
)
from model.checkpoint.local_files import advising

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
_SYNSET: Final = re.compile(r"n\d{8}\s+(\S.*)")  # a WordNet id before a label
# Texts around each label of a file.
_DECORATIONS: Final = (
    _SYNSET,
    *map(re.compile, (r'"([^"]+)",?', r"'([^']+)',?", r"(.*\S)\s*[,;]", r"[-*\u2022]\s+(\S.*)")),
)


def read(text: str, where: str, suffix: str) -> tuple[str, ...] | None:
    """Return the labels of lines without indices and decorations; None for another file."""
    if suffix not in LINE_SUFFIXES or is_document(text):
        return None
    lines = _bare(label_lines(text, where), (_SYNSET,))
    return _numbered_labels(lines, where) or _bare(lines)


def _bare(
    lines: Sequence[str], decorations: Sequence[re.Pattern[str]] = _DECORATIONS
) -> tuple[str, ...]:
    """Return the labels of lines without the decoration that all of them have."""
    for decoration in decorations:
        matches = list(map(decoration.fullmatch, lines))
        if all(matches):
            return tuple(match[1] for match in matches if match)
    return tuple(lines)


def _numbered_labels(lines: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the labels of lines that all have an index; empty for other lines.

    Raises:
        CheckpointError: the numbers look like indices, but one is missing or given twice.
    """
    sides = [rows for pattern in _NUMBERED if (rows := _numbered(lines, pattern))]
    counted = set(range(len(lines)))
    for rows in sides:
        if {index for _, index, _ in rows} == counted:
            return _bare(in_order(rows, where))
    is_clear = all(map(_CLEAR.fullmatch, lines))
    for rows in sides:
        if not is_clear and not {0, 1} & {index for _, index, _ in rows}:
            continue  # because `2 stroke` and `4 cylinders` are labels
        with advising("; if the numbers belong to the labels, write each label in quotes"):
            return in_order(rows, where)
    return ()


def _numbered(lines: Sequence[str], pattern: re.Pattern[str]) -> list[Row]:
    """Return the rows of lines; empty if a line lacks an index, or all labels are equal.

    The numbers of `type 1` and `type 2` are parts of labels.
    """
    matches = [match for line in lines if (match := pattern.fullmatch(line))]
    if len(matches) < len(lines) or len({match["label"] for match in matches}) < 2:
        return []
    return [
        (f"line {number}", int(match["index"]), match["label"])
        for number, match in enumerate(matches, 1)
    ]
