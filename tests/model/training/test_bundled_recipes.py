"""The recipes that travel with the code run, in small."""

from __future__ import annotations

import csv
import json
from dataclasses import fields
from pathlib import Path

import pytest

import model
from model.checkpoint import load_checkpoint
from model.config import ViTConfig
from model.data.cifar10 import CLASSES, IMAGE_SIZE
from model.network.vit import VisionTransformer, count_parameters
from model.training.recipe import RECIPES, Recipe, read_recipe
from model.training.run_folder import CARD_FILE, EpochMetrics
from model.training.run_record import RunRecord
from model.training.train import default_recipe, run
from tests.model.data.picture_folders import write_folder

pytestmark = pytest.mark.timeout(120)  # models are trained

BUNDLED = Path(model.__file__).parent / "weights" / "cifar10"
SMALL = {
    "epochs": 1,
    "batch_size": 20,
    "validation": 0.2,
    "compile": False,
    "threads": 1,
    "architecture.width": 32,
    "architecture.depth": 2,
    "architecture.heads": 2,
    "architecture.mlp_width": 64,
}


@pytest.mark.parametrize("name", ["cifar10-gpu", "cifar10"])
def test_the_recipes_for_cifar_are_of_models_below_six_million_parameters(name: str) -> None:
    architecture = read_recipe(RECIPES / f"{name}.toml").architecture
    assert architecture is not None
    config = architecture.config(IMAGE_SIZE, CLASSES)
    assert config.patch_size == 4
    assert count_parameters(VisionTransformer(config)) <= 6_000_000


def test_the_bundled_checkpoint_is_of_the_bundled_recipe_and_its_records_have_todays_fields() -> None:
    record = json.loads((BUNDLED / "config.json").read_text())["training"]
    assert Recipe.model_validate(record["recipe"]) == read_recipe(RECIPES / "cifar10.toml")
    assert record.keys() == {field.name for field in fields(RunRecord)}
    with (BUNDLED / "metrics.csv").open(newline="") as file:
        assert csv.DictReader(file).fieldnames == [field.name for field in fields(EpochMetrics)]


def test_an_epoch_of_the_recipe_for_a_gpu_runs_on_the_cpu(cifar: Path, tmp_path: Path) -> None:
    recipe = read_recipe(RECIPES / "cifar10-gpu.toml").override(SMALL)
    assert recipe.mixing.cutmix
    assert recipe.ema_decay
    result = run(cifar, tmp_path / "out", recipe, device="cpu", progress=False)
    assert result.epochs == 1
    assert result.precision == "bfloat16"


def test_an_epoch_of_the_recipe_with_a_teacher_runs(cifar: Path, tmp_path: Path) -> None:
    teacher = {"teacher.epochs": 1, "teacher.batch_size": 80, "teacher.widths": (24, 8, 8)}
    stem = {"architecture.conv_stem.widths": (24, 24, 24, 8, 8)}
    recipe = read_recipe(RECIPES / "cifar10.toml").override(SMALL | teacher | stem)
    result = run(cifar, tmp_path / "out", recipe, device="cpu", progress=False)
    assert result.teacher is not None
    assert recipe.architecture is not None
    config = load_checkpoint(str(tmp_path / "out")).config
    assert isinstance(config, ViTConfig)
    assert config.conv_stem == recipe.architecture.conv_stem
    assert "The stem starts as the first layers of the teacher" in (tmp_path / "out" / CARD_FILE).read_text()


def test_an_epoch_of_the_recipe_for_a_folder_runs(tmp_path: Path) -> None:
    recipe = read_recipe(RECIPES / "folder.toml").override(SMALL)
    result = run(write_folder(tmp_path / "data", 10), tmp_path / "out", recipe, device="cpu", progress=False)
    assert (result.images, result.validation_images) == (24, 6)


@pytest.mark.parametrize(
    ("checkpoint", "expected"), [(None, "cifar10"), ("bundled", "finetune")], ids=["scratch", "fine-tuning"]
)
def test_the_default_for_cifar(cifar: Path, checkpoint: str | None, expected: str) -> None:
    assert default_recipe(cifar, checkpoint).stem == expected


def test_the_default_for_a_folder_is_from_scratch_or_fine_tuning(tmp_path: Path) -> None:
    assert default_recipe(tmp_path, None).stem == "folder"
    assert default_recipe(tmp_path, "bundled").stem == "finetune"
