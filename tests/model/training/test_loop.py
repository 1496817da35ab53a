from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tqdm import tqdm

from model.data.cifar10 import CLASSES, IMAGE_SIZE
from model.errors import TrainingError
from model.training import optimisers
from model.training.loop import Trainer
from model.training.optimisers import update_average
from model.training.recipe import Recipe
from model.training.run_folder import METRICS_FILE, STATE_FILE, EpochMetrics
from model.training.training_data import TrainingData
from tests.model.training.runs import CPU, EVERYTHING, interrupted_after, make_trainer, same, same_tensors, trained

pytestmark = pytest.mark.timeout(120)  # models are trained


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_loss_falls_and_unseen_images_are_told_apart(
    recipe: Recipe, data: TrainingData, tmp_path: Path, optimiser: str, precision: str
) -> None:
    settings = recipe.optimiser.model_copy(update={"name": optimiser})
    trainer = trained(recipe.override(epochs=6, precision=precision, optimiser=settings.model_dump()), data, tmp_path)
    first, last = trainer.history[0], trainer.history[-1]
    assert last.train_loss < 0.6 * first.train_loss
    assert last.validation_accuracy is not None
    assert last.validation_accuracy > 0.6
    assert all(tensor.dtype == torch.float32 for tensor in trainer.weights.values())


@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_run_ends_bit_for_bit_as_the_uninterrupted_one(
    recipe: Recipe, data: TrainingData, tmp_path: Path, precision: str, changes: Mapping[str, Any]
) -> None:
    recipe = recipe.override({**changes, "precision": precision})
    whole = trained(recipe, data, tmp_path / "whole")
    interrupted_after(recipe, data, tmp_path / "parts", 2)
    torch.manual_seed(999)  # the rest of the process may have drawn numbers in between
    parts = make_trainer(recipe, data, tmp_path / "parts")
    parts.load()
    assert parts.epoch == 2
    parts.run(progress=False)
    assert same(whole, parts)


def test_each_part_of_a_recipe_has_an_effect(recipe: Recipe, data: TrainingData, tmp_path: Path) -> None:
    plain = recipe.override({"epochs": 1, "drop_path": 0.0, "mixing.mixup": 1.0})
    changes = {**EVERYTHING, "optimiser.clip_norm": 0.01, "mixing.probability": 0.3, "mixing.until": 0.0}
    first = trained(plain, data, tmp_path / "plain")
    for name, value in changes.items():
        if name != "patch_dropout.until":  # none without a rate; the next test is about it
            assert not same(first, trained(plain.override({name: value}), data, tmp_path / name)), name


def test_patches_are_dropped_until_the_told_share_of_the_schedule(
    recipe: Recipe, data: TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(
        recipe.override({"epochs": 2, "patch_dropout.rate": 0.5, "patch_dropout.until": 0.75}), data, tmp_path
    )
    step, rates = trainer._step, []

    def noted_step(*batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rates.append(trainer.model.patch_dropout)
        return step(*batch)

    monkeypatch.setattr(trainer, "_step", noted_step)
    trainer.run(progress=False)
    assert rates == [0.5] * 12 + [0.0] * 4


def test_after_a_restart_the_schedule_begins_anew_at_lower_rates(
    recipe: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    changes = {"epochs": 4, "optimiser.restart": 0.5, "optimiser.restart_rate": 0.25, "mixing.cutmix": 1.0}
    recipe = recipe.override(changes | {"mixing.until": 0.5})  # the second epoch of each cycle
    trainer = trained(recipe, data, tmp_path / "whole")
    rates = [row.learning_rate for row in trainer.history]
    assert [rates[2] / rates[0], rates[3] / rates[1]] == pytest.approx([0.25, 0.25])
    assert trainer.finished
    interrupted_after(recipe, data, tmp_path / "broken", 3)
    broken = make_trainer(recipe, data, tmp_path / "broken")
    broken.load()
    broken.run(progress=False)
    assert same(trainer, broken)


def test_patches_cannot_be_dropped_where_positions_are_relative(
    recipe: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    recipe = recipe.override({"patch_dropout.rate": 0.5})
    assert recipe.architecture is not None
    config = recipe.architecture.config(IMAGE_SIZE, CLASSES).model_copy(update={"relative_position_bias": True})
    with pytest.raises(TrainingError, match="patch_dropout: not with relative or rotary positions"):
        Trainer(recipe, config, data, tmp_path, CPU)


def test_gradients_are_clipped_by_their_common_norm_and_short_ones_left_alone(
    recipe: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    def last_norm(clip_norm: float) -> float:
        trainer = trained(
            recipe.override({"epochs": 1, "optimiser.clip_norm": clip_norm}), data, tmp_path / str(clip_norm)
        )
        gradients = [weight.grad for weight in trainer.weights.values()]
        return float(torch.stack([g.norm() for g in gradients if g is not None]).norm())

    free = last_norm(0.0)
    assert free > 0.05
    assert last_norm(0.05) == pytest.approx(0.05, rel=1e-3)
    assert last_norm(1e6) == free


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_evaluated_and_exported_is_the_moving_average(
    recipe: Recipe, data: TrainingData, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[torch.Tensor]] = []

    def noted_update(average: list[torch.Tensor], weights: list[torch.Tensor], decay: float) -> None:
        seen.append([weight.clone() for weight in weights])
        update_average(average, weights, decay)

    monkeypatch.setattr(optimisers, "update_average", noted_update)
    recipe = recipe.override({"epochs": 1, "ema_decay": 0.5, "precision": precision})
    start = [weight.clone() for weight in make_trainer(recipe, data, tmp_path).weights.values()]
    trainer = trained(recipe, data, tmp_path)
    assert len(seen) == trainer.steps_per_epoch == 8
    for step, weights in enumerate(seen):
        decay = min(0.5, (1 + step) / (10 + step))
        start = [decay * mean + (1 - decay) * weight for mean, weight in zip(start, weights, strict=True)]
    for mean, exported in zip(start, trainer.weights.values(), strict=True):
        torch.testing.assert_close(exported, mean)
    alone = make_trainer(recipe.override(ema_decay=0.0), data, tmp_path / "alone", trainer.weights)
    loss = F.cross_entropy(alone.validation_logits(), data.validation_labels)
    assert loss.item() == trainer.history[-1].validation_loss


def test_another_seed_gives_another_model(recipe: Recipe, data: TrainingData, tmp_path: Path) -> None:
    recipe = recipe.override(epochs=1)
    assert same(trained(recipe, data, tmp_path / "a"), trained(recipe, data, tmp_path / "b"))
    assert not same(trained(recipe, data, tmp_path / "a"), trained(recipe.override(seed=4), data, tmp_path / "c"))


def test_training_leaves_the_global_random_state_alone(recipe: Recipe, data: TrainingData, tmp_path: Path) -> None:
    trainer = make_trainer(recipe.override(epochs=1), data, tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trainer.run(progress=False)
    assert torch.equal(torch.rand(3), expected)


def test_validation_images_are_never_trained_on(recipe: Recipe, data: TrainingData, tmp_path: Path) -> None:
    poisoned = TrainingData(
        data.pixels,
        data.labels,
        255 - data.validation_pixels,
        (data.validation_labels + 1) % CLASSES,
        mean=data.mean,
        std=data.std,
    )
    one, other = trained(recipe, data, tmp_path / "a"), trained(recipe, poisoned, tmp_path / "b")
    assert same_tensors(one.weights, other.weights)


def test_the_metrics_file_has_one_row_an_epoch_and_evaluates_as_often_as_told(
    recipe: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    trained(recipe.override(epochs=5, evaluate_every=3), data, tmp_path)
    with (tmp_path / METRICS_FILE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [row["validation_accuracy"] != "" for row in rows] == [False, False, True, False, True]
    assert all(float(row["images_per_second"]) > 0 for row in rows)
    assert all(int(row["images"]) == 320 for row in rows)


def test_the_schedule_ends_with_its_time_and_the_rate_is_then_almost_zero(
    recipe: Recipe, data: TrainingData, tmp_path: Path
) -> None:
    recipe, ticks = recipe.override(epochs=1000, minutes=1, evaluate_every=1000), itertools.count()
    trainer = make_trainer(recipe, data, tmp_path, clock=lambda: float(next(ticks)))  # one second a look
    trainer.run(progress=False)
    assert 1 <= trainer.epoch < 20
    assert trainer.finished
    assert trainer.history[-1].learning_rate < 0.02 * recipe.optimiser.learning_rate
    assert trainer.history[-1].validation_accuracy is not None
    assert trainer.epochs_trained < trainer.epoch  # the last epoch was cut short
    assert trainer.seconds < 70


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("minutes", "left"), [(None, "05:00"), (2.0, "01:00")], ids=["by epochs", "by time"])
def test_a_terminal_is_told_the_pace_and_what_is_left_of_the_whole_run(
    recipe: Recipe,
    data: TrainingData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    minutes: float | None,
    left: str,
) -> None:
    terminal, clock = Terminal(), [0.0]
    monkeypatch.setattr("sys.stderr", terminal)
    recipe = recipe.override({"epochs": 3, "minutes": minutes})
    trainer = make_trainer(recipe, data, tmp_path, clock=lambda: clock[0])
    step = trainer._step

    def slow_step(*batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        clock[0] += 15.0
        return step(*batch)

    monkeypatch.setattr(trainer, "_step", slow_step)
    told: list[str] = []
    monkeypatch.setattr(tqdm, "set_postfix_str", lambda self, s, refresh: told.append(s))
    trainer.run(lambda row: None, progress=True)
    shown = terminal.getvalue()
    assert "epoch 1/3" in shown
    assert "img/s" in shown
    assert told[3] == f"run: {left} left"  # after a minute, a sixth of 24 steps


def test_what_is_no_terminal_is_told_nothing(
    recipe: Recipe, data: TrainingData, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_trainer(recipe.override(epochs=1), data, tmp_path).run(progress=True)
    assert capfd.readouterr() == ("", "")


def test_resuming_another_recipe_is_refused(recipe: Recipe, data: TrainingData, tmp_path: Path) -> None:
    interrupted_after(recipe, data, tmp_path, 1)
    with pytest.raises(TrainingError, match="another recipe"):
        make_trainer(recipe.override(epochs=9), data, tmp_path).load()


@pytest.mark.parametrize("content", [b"", b"not a state", None], ids=["empty", "garbage", "missing"])
def test_a_state_that_cannot_be_read_is_named(
    recipe: Recipe, data: TrainingData, tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / STATE_FILE).write_bytes(content)
    with pytest.raises(TrainingError, match=r"last\.pt"):
        make_trainer(recipe, data, tmp_path).load()


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path, ("ran",)


def test_a_state_with_code_in_it_is_refused(recipe: Recipe, data: TrainingData, tmp_path: Path) -> None:
    torch.save({"version": 1, "recipe": Payload()}, tmp_path / STATE_FILE)
    with pytest.raises(TrainingError, match="not a training state"):
        make_trainer(recipe, data, tmp_path).load()


def test_a_diverged_run_stops_and_keeps_its_last_good_state(recipe: Recipe, data: TrainingData, tmp_path: Path) -> None:
    trainer = make_trainer(recipe, data, tmp_path)

    def poison(metrics: EpochMetrics) -> None:
        if metrics.epoch == 2:
            with torch.no_grad():
                next(iter(trainer.model.parameters())).fill_(torch.nan)

    with pytest.raises(TrainingError, match="epoch 3: the loss is not finite"):
        trainer.run(poison, progress=False)
    kept = make_trainer(recipe, data, tmp_path)
    kept.load()
    assert kept.epoch == 2
    assert all(tensor.isfinite().all() for tensor in kept.weights.values())


def test_a_run_that_diverges_in_an_epochs_last_step_does_not_save_it(
    recipe: Recipe, data: TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(recipe, data, tmp_path)
    step, steps = trainer._step, itertools.count(1)

    def last_one_diverges(*batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = step(*batch)
        if next(steps) == 2 * trainer.steps_per_epoch:
            trainer.weights["head.bias"].fill_(torch.inf)
        return result

    monkeypatch.setattr(trainer, "_step", last_one_diverges)
    with pytest.raises(TrainingError, match="epoch 2: the loss is not finite"):
        trainer.run(progress=False)
    kept = make_trainer(recipe, data, tmp_path)
    kept.load()
    assert kept.epoch == 1
