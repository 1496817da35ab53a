from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model.checkpoint import load_checkpoint
from model.data.cifar10 import CLASSES
from model.data.pictures import Images
from model.errors import TrainingError
from model.network.layers.patch_embed import ConvStem
from model.training.recipe import RECIPES, Recipe, read_recipe
from model.training.run_folder import CARD_FILE
from model.training.teacher import (
    TeacherNet,
    answers,
    stem_weights,
    train_teacher,
)
from model.training.train import run
from model.training.training_data import Arithmetic, TrainingData
from tests.model.training.runs import CPU, TAUGHT, interrupted_after, make_trainer

pytestmark = pytest.mark.timeout(120)  # models are trained

FLOAT32 = Arithmetic("float32", CPU)


@pytest.fixture
def taught(recipe: Recipe) -> Recipe:
    """Two epochs of a tiny teacher, then two of the model."""
    return recipe.override({"epochs": 2, **TAUGHT})


def teacher_of(recipe: Recipe, data: TrainingData) -> tuple[TeacherNet, dict[str, float]]:
    assert recipe.teacher is not None
    net = TeacherNet(recipe.teacher.widths, CLASSES)
    return net, train_teacher(net, recipe, data, FLOAT32)


def test_the_teacher_learns_and_then_answers_alike_whatever_the_batch(taught: Recipe, data: TrainingData) -> None:
    net, record = teacher_of(taught.override({"teacher.epochs": 4}), data)
    assert record["validation_accuracy"] > 0.6
    assert record["seconds"] > 0
    pixels = data.normalise(torch.from_numpy(data.validation.pixels[:8]))
    found = answers(net, pixels, FLOAT32)
    torch.testing.assert_close(answers(net, pixels[:3], FLOAT32), found[:3])


def test_a_stem_that_starts_as_the_teachers_first_layers_gives_their_features(
    taught: Recipe, data: TrainingData
) -> None:
    net, _ = teacher_of(taught, data)
    config = taught.architecture.config((32, 32), CLASSES).conv_stem if taught.architecture else None
    assert config is not None
    stem = ConvStem(config, 3)
    stem.load_state_dict(stem_weights(net, config))
    pixels = data.normalise(torch.from_numpy(data.validation.pixels[:8]))
    with torch.no_grad():
        expected = net.groups[:2](F.gelu(net.whitening(pixels)))
        features = stem(pixels)
    assert expected.shape == (8, 16, 7, 7)
    assert features.shape == (8, 16, 8, 8)  # the stem sees the row and the column that the teacher leaves out
    torch.testing.assert_close(features[:, :, :5, :5], expected[:, :, :5, :5], atol=1e-4, rtol=1e-4)


def test_a_frozen_stem_stays_the_teachers_until_its_share_of_the_schedule_is_over(
    taught: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    taught = taught.override({"teacher.frozen_stem": 0.5})
    interrupted_after(taught, data, tmp_path / "broken", 1)
    broken = make_trainer(taught, data, tmp_path / "broken")
    broken.load()
    net, _ = teacher_of(taught, data)
    assert broken.config.conv_stem is not None
    for name, weight in stem_weights(net, broken.config.conv_stem).items():
        assert torch.equal(broken.weights[f"patch_embed.backbone.{name}"], weight)
    broken.run()
    for name, weight in stem_weights(net, broken.config.conv_stem).items():
        assert not torch.equal(broken.weights[f"patch_embed.backbone.{name}"], weight)


def test_what_a_teacher_cannot_learn_from_is_refused(taught: Recipe, data: TrainingData, tmp_path: Path) -> None:
    for field, value in {"widths": (24, 24, 24, 16, 8), "pools": (1, 1, 2, 2, 1), "activation": "relu"}.items():
        with pytest.raises(TrainingError, match=r"architecture\.conv_stem is .*; the teacher has "):
            make_trainer(taught.override({f"architecture.conv_stem.{field}": value}), data, tmp_path)
    with pytest.raises(TrainingError, match=r"teacher\.batch_size: there are only 320 training images"):
        teacher_of(taught.override({"teacher.batch_size": 321}), data)
    small = Images(np.ascontiguousarray(data.validation.pixels[..., :8, :8]), data.validation.labels)
    with pytest.raises(TrainingError, match=r"teacher: pictures of .* are too small, at least 9x9"):
        teacher_of(taught, TrainingData(small, small, data.mean, data.std))
    with pytest.raises(TrainingError, match=r"a teacher needs an architecture\.conv_stem"):
        taught.override({"architecture.conv_stem": None})


def test_the_recipe_of_the_bundled_model_runs_in_small_and_tells_of_its_teacher(cifar: Path, tmp_path: Path) -> None:
    small = {"epochs": 1, "batch_size": 20, "validation": 0.2, "threads": 1, "teacher.epochs": 1}
    architecture = {"width": 48, "depth": 2, "heads": 2, "mlp_width": 64, "conv_stem.widths": (24, 24, 24, 8, 8)}
    sizes = {"teacher.batch_size": 80, "teacher.widths": (24, 8, 8)}
    changes = small | sizes | {f"architecture.{name}": value for name, value in architecture.items()}
    recipe = read_recipe(RECIPES / "cifar10.toml").override(changes)
    record = run(cifar, tmp_path / "out", recipe, device="cpu")
    assert recipe.architecture is not None
    assert load_checkpoint(str(tmp_path / "out")).vit.conv_stem == recipe.architecture.conv_stem
    assert json.loads((tmp_path / "out" / "config.json").read_text())["training"] == record
    card = " ".join((tmp_path / "out" / CARD_FILE).read_text().split())
    assert f"teacher of {record['teacher']['parameters']:,} parameters" in card
    assert "The stem starts as the first layers of the teacher" in card
