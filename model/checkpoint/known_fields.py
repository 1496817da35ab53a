"""Fields of the libraries' JSON files, as `known_fields.json` lists them by model type."""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from model.errors import nearest


@cache
def _known_fields() -> dict[str, list[str]]:
    file = resources.files("model.checkpoint").joinpath("known_fields.json")
    fields: dict[str, list[str]] = json.loads(file.read_bytes())
    return fields


def unknown_fields(fields: Mapping[str, Any], *kinds: str) -> list[str]:
    """Return the set fields that no class of these kinds has, each with the likely name."""
    known = {name for kind in kinds for name in _known_fields().get(kind, ())}
    names = [
        name
        for name, value in fields.items()
        if value not in (None, False) and name not in known and not name.startswith("_")
    ]
    likely = {name: nearest(name, known, 0.85) for name in names}
    return [f"{name} ({likely[name]}?)" if likely[name] else name for name in names]
