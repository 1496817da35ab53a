from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import model
from model.data.cifar10 import CLASSES, IMAGE_SIZE
from model.errors import TrainingError
from model.network.vit import VisionTransformer, count_parameters
from model.training.recipe import RECIPES, Recipe, read_recipe
from model.training.train import default_recipe

pytestmark = pytest.mark.timeout(60)  # processes start

ROOT = Path(__file__).resolve().parents[3]
BUNDLED = Path(model.__file__).parent / "weights" / "cifar10"
MINIMAL = """
name = "x"
epochs = 2
batch_size = 8
[architecture]
patch_size = 8
width = 32
depth = 1
heads = 2
mlp_width = 64
[optimiser]
learning_rate = 1e-3
"""


def test_the_bundled_checkpoint_is_of_the_bundled_recipe() -> None:
    recipe = read_recipe(RECIPES / "cifar10.toml")
    assert recipe.architecture is not None
    config = recipe.architecture.config(IMAGE_SIZE, CLASSES)
    assert count_parameters(VisionTransformer(config)) <= 6_000_000
    assert config.attention_source == "cls"
    # The record has fields that no recipe has any more, and the teacher's in two tables.
    record = json.loads((BUNDLED / "config.json").read_text())["training"]["recipe"]
    record["teacher"] |= record["distillation"]

    def holds(today: dict[str, Any], then: dict[str, Any]) -> bool:
        return all(holds(v, then[k]) if isinstance(v, dict) else then[k] == v for k, v in today.items())

    assert holds(recipe.model_dump(mode="json"), record)


def test_a_recipe_is_read_without_torch() -> None:
    code = "import sys, model.training.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_survives_its_record(path: Path, tmp_path: Path) -> None:
    recipe = read_recipe(path).override(name='a "strange" näme')
    record = tmp_path / "recipe.json"
    record.write_text(recipe.model_dump_json(), encoding="utf-8")
    assert read_recipe(record) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "speed = 1\n", "optimiser.speed"),
        (MINIMAL.replace("epochs = 2\n", ""), "epochs: Field required"),
        (MINIMAL.replace("1e-3", "-1.0"), "optimiser.learning_rate"),
        (MINIMAL.replace("1e-3", "inf"), "optimiser.learning_rate"),
        (MINIMAL.replace("\nwidth = 32", "\nwidth = 30"), "architecture.width"),
        (MINIMAL.replace("= 8\nwidth", "= \nwidth"), "not a recipe"),
    ],
    ids=["unknown field", "missing field", "negative rate", "infinite rate", "odd width", "no TOML"],
)
def test_a_bad_recipe_is_refused_with_its_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(TrainingError, match=message) as caught:
        read_recipe(path)
    assert "bad.toml" in str(caught.value)
    with pytest.raises(TrainingError, match=r"none\.toml"):
        read_recipe(tmp_path / "none.toml")


def test_an_override_reaches_into_tables_and_keeps_their_other_fields(recipe: Recipe) -> None:
    changed = recipe.override({"optimiser.learning_rate": 1e-4, "mixing.cutmix": 1.0, "epochs": 2}, seed=8)
    assert changed.optimiser == recipe.optimiser.model_copy(update={"learning_rate": 1e-4})
    assert changed.mixing.cutmix == 1.0
    assert (changed.epochs, changed.seed) == (2, 8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("speed", "speed"),
        ("optimiser.speed", r"optimiser\.speed"),
        ("wheels.count", "wheels"),
        ("epochs.count", r"epochs\.count: epochs is not a table"),
        ("optimiser.learning_rate", r"optimiser\.learning_rate"),
    ],
)
def test_an_override_of_what_is_no_field_or_no_value_is_refused(recipe: Recipe, name: str, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        recipe.override({name: -1})


def test_an_architecture_that_does_not_fit_the_images_is_refused(recipe: Recipe) -> None:
    assert recipe.architecture is not None
    with pytest.raises(TrainingError, match="not a multiple of patch_size 8"):
        recipe.architecture.config((30, 32), 10)


def test_the_default_is_by_data_and_checkpoint(cifar: Path, tmp_path: Path) -> None:
    assert default_recipe(cifar, None).stem == "cifar10"
    assert default_recipe(cifar, "bundled").stem == "finetune"
    (tmp_path / "pictures").mkdir()
    with pytest.raises(TrainingError, match="--from CHECKPOINT: needed for a folder of pictures"):
        default_recipe(tmp_path / "pictures", None)
