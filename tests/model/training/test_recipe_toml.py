from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.training.recipe import RECIPES, Recipe, read_recipe, to_toml

BUNDLED = sorted(RECIPES.glob("*.toml"))


@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.stem)
def test_a_recipe_survives_its_record(path: Path, tmp_path: Path) -> None:
    recipe = read_recipe(path)
    record = tmp_path / "recipe.toml"
    record.write_text(to_toml(recipe), encoding="utf-8")
    assert read_recipe(record) == recipe


@given(
    name=st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20),
    rate=st.floats(1e-9, 1e3),
    validation=st.one_of(st.integers(1, 10**6), st.floats(0.001, 0.999)),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_name_and_number_survives(
    recipe: Recipe, tmp_path: Path, name: str, rate: float, validation: int | float
) -> None:
    changed = recipe.override({"name": name, "optimiser.learning_rate": rate, "validation": validation})
    record = tmp_path / "recipe.toml"
    record.write_bytes(to_toml(changed).encode())
    assert read_recipe(record) == changed
