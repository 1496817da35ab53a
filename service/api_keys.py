"""API keys as the settings have them: a secret and the name that logs and metrics show."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_NAMED = re.compile(r"([A-Za-z0-9_-]{1,64}):(.*)", re.DOTALL)


@dataclass(frozen=True)
class ApiKey:
    """A key, which is secret, and its name, which logs and metrics show."""

    name: str
    secret: bytes


def parse_keys(written: Iterable[str]) -> list[ApiKey]:
    """Return the keys of `NAME:KEY` or `KEY`; a key without a name is called by its place: `key1` is the first.

    Raises:
        ValueError: two keys have the same name, or are the same, or a name has no key: `web:$KEY` of a variable that
            is not set would otherwise be a key that can be guessed.
    """
    keys = []
    for place, text in enumerate(written, start=1):
        named = _NAMED.fullmatch(text)
        keys.append(ApiKey(named[1], named[2].strip().encode()) if named else ApiKey(f"key{place}", text.encode()))
    if not all(key.secret for key in keys):
        raise ValueError("expected a key after each name, as in NAME:KEY")
    if len({key.name for key in keys}) < len(keys):
        raise ValueError("expected a name for one key only")
    if len({key.secret for key in keys}) < len(keys):
        raise ValueError("expected each key once")
    return keys
