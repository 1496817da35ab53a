"""Small runs of the training loop, and what to compare them by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from model.training.loop import Trainer
from model.training.recipe import Recipe
from model.training.run_folder import EpochMetrics
from model.training.train import start_from
from model.training.training_data import TrainingData
from tests.model.training.synthetic import LABELS

CPU = torch.device("cpu")


class Interrupted(Exception):
    """The end of a run that has epochs left."""


def changed(recipe: Recipe, **fields: object) -> Recipe:
    """Return a recipe with other fields."""
    return Recipe.of(recipe.model_dump() | fields)


def make_trainer(recipe: Recipe, data: TrainingData, folder: Path) -> Trainer:
    start = start_from(recipe, LABELS)
    return Trainer(recipe, start.vit, start.tensors, data, folder, CPU)


def trained(recipe: Recipe, data: TrainingData, folder: Path) -> Trainer:
    trainer = make_trainer(recipe, data, folder)
    trainer.run()
    return trainer


def interrupted_after(recipe: Recipe, data: TrainingData, folder: Path, epochs: int) -> None:
    def stop(metrics: EpochMetrics) -> None:
        if metrics["epoch"] == epochs:
            raise Interrupted

    with pytest.raises(Interrupted):
        make_trainer(recipe, data, folder).run(stop)


def same(one: Trainer, other: Trainer) -> bool:
    """Bit for bit: present and best weights, and what was measured."""
    assert one.best is not None
    assert other.best is not None
    return (
        same_tensors(one.weights, other.weights)
        and one.best.epoch == other.best.epoch
        and same_tensors(one.best.weights, other.best.weights)
        and [(row["train_loss"], row["validation_loss"]) for row in one.history]
        == [(row["train_loss"], row["validation_loss"]) for row in other.history]
    )


def same_tensors(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
