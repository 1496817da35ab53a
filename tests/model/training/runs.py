"""Small runs of the training loop, and what to compare them by."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from model.data.pictures import Images
from model.training.loop import fine_tune
from model.training.recipe import Recipe
from model.training.train import start_from
from tests.model.training.synthetic import LABELS


def changed(recipe: Recipe, **fields: object) -> Recipe:
    """Return a recipe with other fields."""
    return Recipe.of(recipe.model_dump() | fields)


def trained(recipe: Recipe, pictures: Images) -> tuple[dict[str, torch.Tensor], list[float]]:
    return fine_tune(start_from(recipe, LABELS), recipe, pictures, torch.device("cpu"))


def same_tensors(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
