from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from model.errors import TrainingError
from model.training.recipe import Recipe

pytestmark = pytest.mark.timeout(60)  # a process starts

ROOT = Path(__file__).resolve().parents[3]


def test_a_recipe_is_read_without_torch() -> None:
    code = "import sys, model.training.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "value"), [("speed", 1), ("learning_rate", -1.0), ("learning_rate", float("inf")), ("name", "two\nlines")]
)
def test_what_is_no_field_or_no_value_is_refused(name: str, value: object) -> None:
    with pytest.raises(TrainingError, match=f"recipe: {name}: "):
        Recipe.of({"name": "x", "checkpoint": "bundled"} | {name: value})
    with pytest.raises(TrainingError, match="recipe: checkpoint: Field required"):
        Recipe.of({"name": "x"})
