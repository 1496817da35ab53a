from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from model.data.cifar10 import CLASSES
from model.data.pictures import Images
from model.errors import TrainingError
from model.training.loop import EpochMetrics
from model.training.recipe import Recipe
from model.training.training_data import TrainingData
from tests.model.training.runs import changed, make_trainer, same_tensors, trained

pytestmark = pytest.mark.timeout(120)  # models are trained


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_loss_falls_and_unseen_images_are_told_apart(recipe: Recipe, data: TrainingData, precision: str) -> None:
    trainer, _ = trained(changed(recipe, precision=precision, epochs=6), data)
    first, last = trainer.history[0], trainer.history[-1]
    assert last["train_loss"] < 0.7 * first["train_loss"]
    assert last["validation_accuracy"] > 0.6
    assert all(tensor.dtype == torch.float32 for tensor in trainer.weights.values())


def test_a_recipe_ends_in_the_same_bits_and_each_part_of_it_has_an_effect(recipe: Recipe, data: TrainingData) -> None:
    plain = changed(recipe, epochs=1, weight_decay=0.0)
    changes: dict[str, Any] = {
        "seed": 4,
        "label_smoothing": 0.1,
        "learning_rate": 1e-3,
        "layer_decay": 0.8,
        "clip_norm": 0.01,
        "weight_decay": 0.1,
        "warmup": 0.3,
        "flip": False,
        "resized_crop": 0.9,
    }
    first = trained(plain, data)[0].weights
    torch.manual_seed(999)  # the rest of the process may have drawn numbers in between
    assert same_tensors(first, trained(plain, data)[0].weights)
    for name, value in changes.items():
        assert not same_tensors(first, trained(changed(plain, **{name: value}), data)[0].weights), name


def test_validation_images_are_never_trained_on(recipe: Recipe, data: TrainingData) -> None:
    others = Images(255 - data.validation.pixels, (data.validation.labels + 1) % CLASSES)
    one, other = trained(recipe, data), trained(recipe, replace(data, validation=others))
    assert same_tensors(one[0].weights, other[0].weights)


def test_the_best_weights_are_those_of_the_best_validation_epoch(recipe: Recipe, data: TrainingData) -> None:
    kept: dict[int, dict[str, torch.Tensor]] = {}
    trainer = make_trainer(changed(recipe, epochs=6), data)
    found = trainer.run(
        lambda row: kept.update({int(row["epoch"]): {name: w.clone() for name, w in trainer.weights.items()}})
    )
    best = max(trainer.history, key=lambda row: (row["validation_accuracy"], -row["validation_loss"]))
    assert found.epoch == best["epoch"]
    assert same_tensors(found.weights, kept[int(best["epoch"])])


def test_a_diverged_run_stops(recipe: Recipe, data: TrainingData) -> None:
    trainer = make_trainer(recipe, data)

    def poison(metrics: EpochMetrics) -> None:
        if metrics["epoch"] == 2:
            trainer.weights["head.bias"].fill_(torch.nan)

    with pytest.raises(TrainingError, match="epoch 3: the loss is not finite"):
        trainer.run(poison)
