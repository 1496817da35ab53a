"""Small runs of the training loop, and what to compare them by."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from model.training.loop import BestWeights, Trainer
from model.training.recipe import Recipe
from model.training.train import start_from
from model.training.training_data import TrainingData
from tests.model.training.synthetic import LABELS


def changed(recipe: Recipe, **fields: object) -> Recipe:
    """Return a recipe with other fields."""
    return Recipe.of(recipe.model_dump() | fields)


def make_trainer(recipe: Recipe, data: TrainingData) -> Trainer:
    start = start_from(recipe, LABELS)
    return Trainer(recipe, start.vit, start.tensors, data, torch.device("cpu"))


def trained(recipe: Recipe, data: TrainingData) -> tuple[Trainer, BestWeights]:
    trainer = make_trainer(recipe, data)
    return trainer, trainer.run()


def same_tensors(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
