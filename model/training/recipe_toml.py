"""A recipe as a TOML file: the record of a run, and the way to repeat it."""

from __future__ import annotations

import json
from typing import Any

from model.training.recipe import Recipe


def to_toml(recipe: Recipe) -> str:
    """Write the whole recipe, defaults included; `read_recipe` reads the same one back."""
    values = recipe.model_dump(mode="json", exclude_none=True)
    tables = {name: value for name, value in values.items() if isinstance(value, dict)}
    parts = [_lines({name: value for name, value in values.items() if name not in tables})]
    parts += [f"[{name}]\n{_lines(table)}" for name, table in tables.items()]
    return "\n".join(parts)


def _lines(values: dict[str, Any]) -> str:
    # JSON's strings, numbers, booleans and lists of them are TOML's, too; DEL alone has to be escaped here as well.
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items()).replace(
        "\x7f", "\\u007f"
    )
