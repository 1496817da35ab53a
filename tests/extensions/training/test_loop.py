import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from model.checkpoint import load_checkpoint
from model.errors import TrainingError
from model.extensions.datasets.pictures import Images
from model.extensions.evaluation.cifar10 import CLASSES
from model.extensions.training.optimisers import ModelOptimiser, Position, layer_of, position
from model.extensions.training.recipe import RECIPES, Recipe, read_recipe
from model.extensions.training.run_folder import CARD_FILE, METRICS_FILE, STATE_FILE, EpochMetrics
from model.extensions.training.teacher import (
    TeacherNet,
    answers,
    stem_weights,
    train_teacher,
)
from model.extensions.training.train import run
from model.extensions.training.training_data import Arithmetic, TrainingData
from model.network.layers.patch_embed import ConvStem
from model.network.vit import VisionTransformer
from tests.extensions.training.runs import (
    CPU,
    EVERYTHING,
    TAUGHT,
    interrupted_after,
    make_trainer,
    same,
    same_tensors,
    trained,
)

pytestmark = pytest.mark.timeout(120)  # models are trained


@pytest.mark.parametrize(
    ("optimiser", "precision"), [("adamw", "float32"), ("muon", "float32"), ("muon", "bfloat16")]
)
def test_training_learns_unseen_images(
    recipe: Recipe, data: TrainingData, tmp_path: Path, optimiser: str, precision: str
) -> None:
    trainer = trained(
        recipe.override({"precision": precision, "optimiser.name": optimiser}), data, tmp_path
    )
    first = trainer.history[0]
    last = trainer.history[-1]
    assert last["train_loss"] < 0.7 * first["train_loss"]
    assert last["validation_accuracy"] > 0.6
    assert all(tensor.dtype == torch.float32 for tensor in trainer.weights.values())


@pytest.mark.parametrize(
    ("changes", "precision"), [({}, "bfloat16"), (EVERYTHING, "float32")], ids=["plain", "all"]
)
def test_a_resumed_run_equals_a_whole_one(
    recipe: Recipe, few: TrainingData, tmp_path: Path, precision: str, changes: Mapping[str, Any]
) -> None:
    recipe = recipe.override({**changes, "precision": precision, "epochs": 2})
    whole = trained(recipe, few, tmp_path / "whole")
    interrupted_after(recipe, few, tmp_path / "parts", 1)
    torch.manual_seed(999)  # the rest of the process may have drawn numbers meanwhile
    parts = make_trainer(recipe, few, tmp_path / "parts")
    parts.load()
    assert parts.epoch == 1
    parts.run()
    assert same(whole, parts)


def test_each_part_of_a_recipe_has_an_effect(
    recipe: Recipe, few: TrainingData, tmp_path: Path
) -> None:
    plain = recipe.override({"epochs": 1, "mixing.mixup": 1.0, "optimiser.weight_decay": 0.0})
    changes: dict[str, Any] = {
        "seed": 4,
        "label_smoothing": 0.1,
        "optimiser.layer_decay": 0.8,
        "optimiser.clip_norm": 0.01,
        "optimiser.restart": 0.5,
        "optimiser.weight_decay": 0.1,
        "augmentation.flip": False,
        "augmentation.resized_crop": 0.5,
        "augmentation.resample": 0.2,
        "augmentation.trivial_augment": 0.5,
        "mixing.cutmix": 1.0,
        "mixing.probability": 0.3,
        "mixing.until": 0.0,
        "patch_dropout.rate": 0.25,
    }
    first = trained(plain, few, tmp_path / "plain")
    assert same(first, trained(plain, few, tmp_path / "again"))
    for name, value in changes.items():
        assert not same(first, trained(plain.override({name: value}), few, tmp_path / name)), name


def test_a_restart_begins_the_schedule_anew(
    recipe: Recipe, few: TrainingData, tmp_path: Path
) -> None:
    changes = {"epochs": 4, "optimiser.restart": 0.5, "optimiser.restart_rate": 0.25}
    trainer = make_trainer(
        recipe.override(changes | {"patch_dropout.rate": 0.5, "patch_dropout.until": 0.5}),
        few,
        tmp_path,
    )
    dropped = []
    trainer.run(lambda _: dropped.append(trainer.patch_dropper.rate))
    rates = [row["learning_rate"] for row in trainer.history]
    assert [rates[2] / rates[0], rates[3] / rates[1]] == pytest.approx([0.25, 0.25])
    assert dropped == [0.5, 0.0, 0.5, 0.0]  # after each epoch's last step


def test_validation_images_are_not_learned(
    recipe: Recipe, few: TrainingData, tmp_path: Path
) -> None:
    changed = Images(255 - few.validation.pixels, (few.validation.labels + 1) % CLASSES)
    poisoned = replace(few, validation=changed)
    one = trained(recipe, few, tmp_path / "a")
    other = trained(recipe, poisoned, tmp_path / "b")
    assert same_tensors(one.weights, other.weights)


def test_the_best_validation_epoch_is_kept(
    recipe: Recipe, few: TrainingData, tmp_path: Path
) -> None:
    kept: dict[int, dict[str, torch.Tensor]] = {}
    trainer = make_trainer(recipe.override(epochs=6), few, tmp_path)
    trainer.run(
        lambda row: kept.update(
            {int(row["epoch"]): {name: w.clone() for name, w in trainer.weights.items()}}
        )
    )
    best = max(
        trainer.history, key=lambda row: (row["validation_accuracy"], -row["validation_loss"])
    )
    assert trainer.best is not None
    assert trainer.best.epoch == best["epoch"]
    assert same_tensors(trainer.best.weights, kept[int(best["epoch"])])
    with (tmp_path / METRICS_FILE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert [float(row["validation_loss"]) for row in rows] == [
        row["validation_loss"] for row in trainer.history
    ]


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path, ("ran",)


def test_a_state_of_another_run_is_refused(
    recipe: Recipe, few: TrainingData, tmp_path: Path
) -> None:
    interrupted_after(recipe, few, tmp_path, 1)
    with pytest.raises(TrainingError, match="another recipe"):
        make_trainer(recipe.override(epochs=9), few, tmp_path).load()
    for content in (b"", b"not a state"):
        (tmp_path / STATE_FILE).write_bytes(content)
        with pytest.raises(TrainingError, match=r"last\.pt: not a training state"):
            make_trainer(recipe, few, tmp_path).load()
    torch.save({"recipe": Payload()}, tmp_path / STATE_FILE)
    with pytest.raises(TrainingError, match="not a training state"):
        make_trainer(recipe, few, tmp_path).load()


def test_a_diverged_run_keeps_its_good_state(
    recipe: Recipe, few: TrainingData, tmp_path: Path
) -> None:
    trainer = make_trainer(recipe, few, tmp_path)

    def poison(metrics: EpochMetrics) -> None:
        if metrics["epoch"] == 2:
            trainer.weights["head.bias"].fill_(torch.nan)

    with pytest.raises(TrainingError, match="epoch 3: the loss is not finite"):
        trainer.run(poison)
    kept = make_trainer(recipe, few, tmp_path)
    kept.load()
    assert kept.epoch == 2
    assert all(tensor.isfinite().all() for tensor in kept.weights.values())


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("patch_embed.proj.weight", 0),
        ("dist_token", 0),
        ("pos_embed", 0),
        ("norm_pre.weight", 0),
        ("blocks.0.attn.qkv.weight", 1),
        ("blocks.11.mlp.fc2.bias", 12),
        ("norm.weight", 13),
        ("attn_pool.latent", 13),
        ("head_dist.bias", 13),
    ],
)
def test_layers_are_numbered_as_in_beit(name: str, layer: int) -> None:
    assert layer_of(name, 12) == layer


def stepped(recipe: Recipe, **settings: object) -> dict[str, torch.Tensor]:
    """Return the change of each weight after one update by the same gradients."""
    recipe = recipe.override(
        {**TAUGHT, **{f"optimiser.{name}": value for name, value in settings.items()}}
    )
    assert recipe.architecture is not None
    model = VisionTransformer(recipe.architecture.config((32, 32), 10))
    model.reset_parameters(torch.Generator().manual_seed(0))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = 5 + torch.randn(
            parameter.shape, generator=generator
        )  # one direction dominates
    optimiser = ModelOptimiser(model, recipe.optimiser)
    optimiser.set_rate(Position(recipe.optimiser.warmup, restarted=False))
    optimiser.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    return {name: weight - before[name] for name, weight in model.state_dict().items()}


def test_layer_decay_shrinks_steps_downwards(recipe: Recipe) -> None:
    for name in ("adamw", "muon"):
        plain = stepped(recipe, name=name, weight_decay=0.0)
        decayed = stepped(recipe, name=name, weight_decay=0.0, layer_decay=0.5)
        shares = {
            "head.weight": 1,
            "blocks.1.attn.qkv.bias": 2,
            "blocks.0.mlp.fc1.weight": 4,
            "pos_embed": 8,
        }
        for weight, divisor in shares.items():
            torch.testing.assert_close(
                decayed[weight] * divisor, plain[weight], rtol=1e-3, atol=1e-5
            )


def test_only_matrices_decay_or_use_muon(
    recipe: Recipe,
) -> None:
    plain, decayed = (stepped(recipe, weight_decay=decay) for decay in (0.0, 0.1))
    adamw = stepped(recipe, name="adamw", weight_decay=0.0)
    for name, step in plain.items():
        is_matrix = step.ndim > 1
        if name != "head.weight":  # it starts at zero
            assert torch.equal(step, decayed[name]) == (not is_matrix), name
        by_muon = is_matrix and name.startswith(("blocks.", "patch_embed.backbone."))
        assert torch.equal(step, adamw[name]) == (not by_muon), name
    step = plain["patch_embed.backbone.1.weight"].flatten(
        1
    )  # filters of a stem are the rows of a matrix
    lengths = torch.linalg.svdvals(
        step
    )  # Muon's steps are equally long in all directions, AdamW's are not
    assert lengths.min() > 0.4 * lengths.max()


def test_a_second_cycle_fills_the_rest() -> None:
    assert [position(step, 40, 0.7) for step in range(28)] == [
        position(step, 28, 0.0) for step in range(28)
    ]
    assert [position(step, 40, 0.7) for step in (28, 34)] == [(0.0, True), (0.5, True)]
    assert position(9, 10, 0.99) == (0.0, True), "a step is left for it"
    assert position(0, 1, 0.6) == (0.0, False), "one step is one cycle"


FLOAT32 = Arithmetic("float32", CPU)


@pytest.fixture
def taught(recipe: Recipe) -> Recipe:
    """Train a tiny teacher for an epoch, then the model for two."""
    return recipe.override({"epochs": 2, **TAUGHT})


def teacher_of(recipe: Recipe, data: TrainingData) -> tuple[TeacherNet, dict[str, float]]:
    assert recipe.teacher is not None
    net = TeacherNet(recipe.teacher.widths, CLASSES)
    return net, train_teacher(net, recipe, data, FLOAT32)


def test_teacher_answers_ignore_the_batch(taught: Recipe, data: TrainingData) -> None:
    net, record = teacher_of(
        taught.override({"teacher.epochs": 4, "teacher.widths": (24, 16, 16)}), data
    )
    assert record["validation_accuracy"] > 0.6
    assert record["seconds"] > 0
    pixels = data.normalise(torch.from_numpy(data.validation.pixels[:8]))
    found = answers(net, pixels, FLOAT32)
    torch.testing.assert_close(answers(net, pixels[:3], FLOAT32), found[:3])


def test_a_stem_gives_the_teachers_features(taught: Recipe, few: TrainingData) -> None:
    net, _ = teacher_of(taught, few)
    config = (
        taught.architecture.config((32, 32), CLASSES).conv_stem if taught.architecture else None
    )
    assert config is not None
    stem = ConvStem(config, 3)
    stem.load_state_dict(stem_weights(net, config))
    pixels = few.normalise(torch.from_numpy(few.validation.pixels[:8]))
    with torch.no_grad():
        expected = net.groups[:2](F.gelu(net.whitening(pixels)))
        features = stem(pixels)
    assert expected.shape == (8, 8, 7, 7)
    # The stem sees the row and the column that the teacher omits.
    assert features.shape == (8, 8, 8, 8)
    torch.testing.assert_close(features[:, :, :5, :5], expected[:, :, :5, :5], atol=1e-4, rtol=1e-4)


def test_a_frozen_stem_thaws_at_its_share(
    taught: Recipe, few: TrainingData, tmp_path: Path
) -> None:
    taught = taught.override({"teacher.frozen_stem": 0.5})
    interrupted_after(taught, few, tmp_path / "broken", 1)
    broken = make_trainer(taught, few, tmp_path / "broken")
    broken.load()
    net, _ = teacher_of(taught, few)
    assert broken.config.conv_stem is not None
    for name, weight in stem_weights(net, broken.config.conv_stem).items():
        assert torch.equal(broken.weights[f"patch_embed.backbone.{name}"], weight)
    broken.run()
    for name, weight in stem_weights(net, broken.config.conv_stem).items():
        assert not torch.equal(broken.weights[f"patch_embed.backbone.{name}"], weight)


def test_an_impossible_teacher_is_refused(
    taught: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    for field, value in {
        "widths": (24, 24, 24, 8, 16),
        "pools": (1, 1, 2, 2, 1),
        "activation": "relu",
    }.items():
        with pytest.raises(TrainingError, match=r"architecture\.conv_stem is .*; the teacher has "):
            make_trainer(
                taught.override({f"architecture.conv_stem.{field}": value}), data, tmp_path
            )
    with pytest.raises(
        TrainingError, match=r"teacher\.batch_size: there are only 320 training images"
    ):
        teacher_of(taught.override({"teacher.batch_size": 321}), data)
    small = Images(
        np.ascontiguousarray(data.validation.pixels[..., :8, :8]), data.validation.labels
    )
    with pytest.raises(TrainingError, match=r"teacher: pictures of .* are too small, at least 9x9"):
        teacher_of(taught, TrainingData(small, small, data.mean, data.std))
    with pytest.raises(TrainingError, match=r"a teacher needs an architecture\.conv_stem"):
        taught.override({"architecture.conv_stem": None})


def test_the_bundled_recipe_runs_in_small(cifar: Path, tmp_path: Path) -> None:
    small = {"epochs": 1, "batch_size": 20, "validation": 0.2, "threads": 1, "teacher.epochs": 1}
    architecture = {
        "width": 48,
        "depth": 2,
        "heads": 2,
        "mlp_width": 64,
        "conv_stem.widths": (24, 24, 24, 8, 8),
    }
    sizes = {"teacher.batch_size": 80, "teacher.widths": (24, 8, 8)}
    changes = (
        small | sizes | {f"architecture.{name}": value for name, value in architecture.items()}
    )
    recipe = read_recipe(RECIPES / "cifar10.toml").override(changes)
    record = run(cifar, tmp_path / "out", recipe, device="cpu")
    assert recipe.architecture is not None
    assert load_checkpoint(str(tmp_path / "out")).vit.conv_stem == recipe.architecture.conv_stem
    assert json.loads((tmp_path / "out" / "config.json").read_text())["training"] == record
    card = " ".join((tmp_path / "out" / CARD_FILE).read_text().split())
    assert f"teacher of {record['teacher']['parameters']:,} parameters" in card
    assert "The stem starts as the first layers of the teacher" in card
