"""docs/training.md names every field of a recipe, every bundled recipe, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

from model.training.recipe import RECIPES, Architecture, Recipe, Teacher
from service.cli.train import OVERRIDES

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "training.md").read_text()

OPTIONAL: dict[str, type[BaseModel]] = {"architecture": Architecture, "teacher": Teacher}
"""The tables that a recipe may lack."""


def table(header: str) -> list[list[str]]:
    """Cells of the rows below a header."""
    [_, rest] = TEXT.split(header + "\n")
    lines = rest.split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def test_every_field_of_a_recipe_is_in_the_table() -> None:
    rows = table("| field | meaning |")
    told = set().union(*(names(first) for first, _ in rows))
    told |= {"checkpoint_architecture", "checkpoint_preprocess"} & names(TEXT)
    assert told == set(Recipe.model_fields)
    for first, meaning in rows:
        [*fields] = names(first)
        kind = Recipe.model_fields[fields[0]].annotation
        inner = OPTIONAL.get(fields[0], kind)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            assert set(inner.model_fields) <= names(meaning), first


def test_every_bundled_recipe_is_in_the_table() -> None:
    told = {row[0].strip("`") for row in table("| recipe | for | default |")}
    assert told == {path.stem for path in RECIPES.glob("*.toml")}


def test_every_flag_that_sets_a_field_is_named() -> None:
    for flag in OVERRIDES:
        assert f"`--{flag}`" in TEXT
