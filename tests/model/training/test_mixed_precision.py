from __future__ import annotations

import pytest
import torch

from model.network.vit import VisionTransformer
from model.training.optimisers import MixedPrecisionOptimiser, Position, update_average, warmed_up_decay
from model.training.recipe import Recipe
from tests.model.training.runs import EVERYTHING

pytestmark = pytest.mark.timeout(120)  # models are trained


def test_the_average_is_the_formula_applied_at_each_step() -> None:
    average, expected = [torch.tensor([1.0, 2.0])], torch.tensor([1.0, 2.0])
    for step in range(5):
        weights = torch.full((2,), float(step))
        update_average(average, [weights], 0.9)
        expected = 0.9 * expected + 0.1 * weights
    torch.testing.assert_close(average[0], expected)


def test_early_steps_keep_less_and_late_ones_the_decay() -> None:
    assert warmed_up_decay(0.999, 0) == pytest.approx(0.1)
    assert warmed_up_decay(0.999, 90) == pytest.approx(0.91)
    assert warmed_up_decay(0.999, 1_000_000) == 0.999
    assert warmed_up_decay(0.05, 0) == 0.05


def test_muon_turns_the_filters_of_a_stem_as_the_rows_of_a_matrix(recipe: Recipe) -> None:
    changes = {"architecture.conv_stem": EVERYTHING["architecture.conv_stem"], "optimiser.weight_decay": 0.0}
    recipe = recipe.override(changes)
    assert recipe.architecture is not None
    model = VisionTransformer(recipe.architecture.config((32, 32), 10))
    model.reset_parameters(torch.Generator().manual_seed(0))
    name = "patch_embed.backbone.1.weight"
    before = model.state_dict()[name].clone()
    optimiser = MixedPrecisionOptimiser(model, torch.float32, recipe)
    optimiser.set_rate(Position(recipe.optimiser.warmup, restarted=False))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = 5 + torch.randn(parameter.shape, generator=generator)  # one direction outweighs all
    optimiser.step()
    assert optimiser.weights[name].shape == (8, 8, 3, 3)
    assert torch.equal(model.state_dict()[name], optimiser.weights[name])
    step = (optimiser.weights[name] - before).flatten(1)
    lengths = torch.linalg.svdvals(step)  # Muon's steps go equally far in all directions, AdamW's do not
    assert lengths.min() > 0.4 * lengths.max()
