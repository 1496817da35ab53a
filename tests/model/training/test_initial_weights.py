from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.training.recipe import Recipe
from model.training.training_data import TrainingData
from tests.model.training.runs import interrupted_after, make_trainer, same_tensors, trained

pytestmark = pytest.mark.timeout(120)  # models are trained


@pytest.fixture
def initial(recipe: Recipe, data: TrainingData, tmp_path: Path) -> dict[str, Tensor]:
    weights = make_trainer(recipe, data, tmp_path).weights
    generator = torch.Generator().manual_seed(1)
    return {name: 0.02 * torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_starts_from_the_given_weights_and_does_not_touch_them(
    recipe: Recipe, data: TrainingData, tmp_path: Path, initial: dict[str, Tensor], precision: str
) -> None:
    before = {name: weight.clone() for name, weight in initial.items()}
    trainer = make_trainer(recipe.override(epochs=1, precision=precision), data, tmp_path, initial)
    assert same_tensors(trainer.weights, initial)
    trainer.run(progress=False)
    assert not same_tensors(trainer.weights, initial)
    assert same_tensors(initial, before)


def test_a_loaded_state_takes_the_place_of_initial_weights(
    recipe: Recipe, data: TrainingData, tmp_path: Path, initial: dict[str, Tensor]
) -> None:
    whole = trained(recipe, data, tmp_path / "whole")
    interrupted_after(recipe, data, tmp_path / "parts", 2)
    trainer = make_trainer(recipe, data, tmp_path / "parts", initial)
    trainer.load()
    trainer.run(progress=False)
    assert same_tensors(trainer.weights, whole.weights)
