"""Refuses JSON objects that repeat a name; a parser would silently keep the last value."""

from collections.abc import Sequence
from typing import Any


class DuplicateName(ValueError):
    """An object has a name twice."""


def unique_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object from its pairs, for `json.loads`; raises `DuplicateName`."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise DuplicateName(f"{name[:50]!r} is given twice: send one")
        values[name] = value
    return values
