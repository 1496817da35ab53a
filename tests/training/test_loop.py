from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from model.errors import TrainingError
from model.training import loop
from model.training.cifar10 import CLASSES, IMAGE_SIZE, hold_out, read_train
from model.training.loop import METRICS_FILE, STATE_FILE, Data, EpochMetrics, Trainer, plain_attention, rate_factor
from model.training.recipe import Recipe

CPU = torch.device("cpu")


@pytest.fixture
def data(cifar: Path, recipe: Recipe) -> Data:
    train, held_out = hold_out(read_train(cifar), recipe.held_out, recipe.seed)
    return Data(
        *(torch.from_numpy(a) for a in (train.pixels, train.labels, held_out.pixels, held_out.labels)),
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
    )


def make_trainer(recipe: Recipe, data: Data, folder: Path) -> Trainer:
    return Trainer(recipe, recipe.architecture.config(IMAGE_SIZE, CLASSES), data, folder, CPU)


def trained(recipe: Recipe, data: Data, folder: Path) -> Trainer:
    trainer = make_trainer(recipe, data, folder)
    trainer.run(progress=False)
    return trainer


class Interrupted(Exception):
    pass


def interrupted_after(recipe: Recipe, data: Data, folder: Path, epochs: int) -> None:
    def stop(metrics: EpochMetrics) -> None:
        if metrics.epoch == epochs:
            raise Interrupted

    with pytest.raises(Interrupted):
        make_trainer(recipe, data, folder).run(stop, progress=False)


def same(one: Trainer, other: Trainer) -> bool:
    return all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_loss_falls_and_unseen_images_are_told_apart(
    recipe: Recipe, data: Data, tmp_path: Path, optimiser: str, precision: str
) -> None:
    settings = recipe.optimiser.model_copy(update={"name": optimiser})
    trainer = trained(recipe.override(epochs=6, precision=precision, optimiser=settings.model_dump()), data, tmp_path)
    first, last = trainer.history[0], trainer.history[-1]
    assert last.train_loss < 0.6 * first.train_loss
    assert last.held_out_accuracy is not None
    assert last.held_out_accuracy > 0.6
    assert all(tensor.dtype == torch.float32 for tensor in trainer.weights.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_run_ends_bit_for_bit_as_the_uninterrupted_one(
    recipe: Recipe, data: Data, tmp_path: Path, precision: str
) -> None:
    recipe = recipe.override(precision=precision)
    whole = trained(recipe, data, tmp_path / "whole")
    interrupted_after(recipe, data, tmp_path / "parts", 2)
    torch.manual_seed(999)  # the rest of the process may have drawn numbers in between
    resumed = make_trainer(recipe, data, tmp_path / "parts")
    resumed.load()
    assert resumed.epoch == 2
    resumed.run(progress=False)
    assert same(whole, resumed)
    assert [row.train_loss for row in whole.history] == [row.train_loss for row in resumed.history]
    assert [row.held_out_loss for row in whole.history] == [row.held_out_loss for row in resumed.history]


def test_another_seed_gives_another_model(recipe: Recipe, data: Data, tmp_path: Path) -> None:
    recipe = recipe.override(epochs=1)
    assert same(trained(recipe, data, tmp_path / "a"), trained(recipe, data, tmp_path / "b"))
    assert not same(trained(recipe, data, tmp_path / "a"), trained(recipe.override(seed=4), data, tmp_path / "c"))


def test_training_leaves_the_global_random_state_alone(recipe: Recipe, data: Data, tmp_path: Path) -> None:
    trainer = make_trainer(recipe.override(epochs=1), data, tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trainer.run(progress=False)
    assert torch.equal(torch.rand(3), expected)


def test_held_out_images_are_never_trained_on(recipe: Recipe, data: Data, tmp_path: Path) -> None:
    poisoned = Data(
        data.pixels,
        data.labels,
        255 - data.held_out_pixels,
        (data.held_out_labels + 1) % CLASSES,
        mean=data.mean,
        std=data.std,
    )
    assert same(trained(recipe, data, tmp_path / "a"), trained(recipe, poisoned, tmp_path / "b"))


def test_the_metrics_file_has_one_row_an_epoch_and_evaluates_as_often_as_told(
    recipe: Recipe, data: Data, tmp_path: Path
) -> None:
    trained(recipe.override(epochs=5, evaluate_every=3), data, tmp_path)
    with (tmp_path / METRICS_FILE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [row["held_out_accuracy"] != "" for row in rows] == [False, False, True, False, True]
    assert all(float(row["images_per_second"]) > 0 for row in rows)
    assert all(int(row["images"]) == 320 for row in rows)


def test_the_schedule_ends_with_its_time_and_the_rate_is_then_almost_zero(
    recipe: Recipe, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(1_000_000))
    monkeypatch.setattr(loop.time, "monotonic", lambda: float(next(ticks)))  # one second a look
    trainer = trained(recipe.override(epochs=1000, minutes=1, evaluate_every=1000), data, tmp_path)
    assert 1 <= trainer.epoch < 20
    assert trainer.finished
    assert trainer.history[-1].learning_rate < 0.02 * recipe.optimiser.learning_rate
    assert trainer.history[-1].held_out_accuracy is not None
    assert trainer.epochs_trained < trainer.epoch  # the last epoch was cut short
    assert trainer.seconds < 70


def test_the_rate_rises_then_falls_to_zero() -> None:
    factors = [rate_factor(step / 1000, 0.1) for step in range(1001)]
    assert factors.index(max(factors)) == 100
    assert max(factors) == pytest.approx(1.0)
    assert factors[:101] == sorted(factors[:101])
    assert factors[100:] == sorted(factors[100:], reverse=True)
    assert factors[0] > 0
    assert factors[-1] == pytest.approx(0.0, abs=1e-9)


def test_a_schedule_without_warm_up_starts_at_its_peak() -> None:
    assert rate_factor(0.0, 0.0) == pytest.approx(1.0)


def test_plain_attention_is_the_fused_kernels() -> None:
    q, k, v = torch.randn(3, 2, 4, 17, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_resuming_another_recipe_is_refused(recipe: Recipe, data: Data, tmp_path: Path) -> None:
    interrupted_after(recipe, data, tmp_path, 1)
    with pytest.raises(TrainingError, match="another recipe"):
        make_trainer(recipe.override(epochs=9), data, tmp_path).load()


@pytest.mark.parametrize("content", [b"", b"not a state", None], ids=["empty", "garbage", "missing"])
def test_a_state_that_cannot_be_read_is_named(
    recipe: Recipe, data: Data, tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / STATE_FILE).write_bytes(content)
    with pytest.raises(TrainingError, match=r"last\.pt"):
        make_trainer(recipe, data, tmp_path).load()


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path, ("ran",)


def test_a_state_with_code_in_it_is_refused(recipe: Recipe, data: Data, tmp_path: Path) -> None:
    torch.save({"version": 1, "recipe": Payload()}, tmp_path / STATE_FILE)
    with pytest.raises(TrainingError, match="not a training state"):
        make_trainer(recipe, data, tmp_path).load()


def test_fewer_images_than_a_batch_are_refused(recipe: Recipe, data: Data, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="320 training images do not fill one batch of 321"):
        make_trainer(recipe.override(batch_size=321), data, tmp_path)


def test_a_diverged_run_stops_and_keeps_its_last_good_state(recipe: Recipe, data: Data, tmp_path: Path) -> None:
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
