from __future__ import annotations

import pytest
import torch

from model.network.vit import VisionTransformer
from model.training.optimisers import ModelOptimiser, Position, layer_of, position
from model.training.recipe import Recipe
from tests.model.training.runs import TAUGHT


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
    """Change of each weight in one update by the same gradients."""
    recipe = recipe.override({**TAUGHT, **{f"optimiser.{name}": value for name, value in settings.items()}})
    assert recipe.architecture is not None
    model = VisionTransformer(recipe.architecture.config((32, 32), 10))
    model.reset_parameters(torch.Generator().manual_seed(0))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = 5 + torch.randn(parameter.shape, generator=generator)  # one direction outweighs all
    optimiser = ModelOptimiser(model, recipe.optimiser)
    optimiser.set_rate(Position(recipe.optimiser.warmup, restarted=False))
    optimiser.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    return {name: weight - before[name] for name, weight in model.state_dict().items()}


def test_steps_shrink_by_one_factor_a_layer_from_the_head_down(recipe: Recipe) -> None:
    for name in ("adamw", "muon"):
        plain = stepped(recipe, name=name, weight_decay=0.0)
        decayed = stepped(recipe, name=name, weight_decay=0.0, layer_decay=0.5)
        shares = {"head.weight": 1, "blocks.1.attn.qkv.bias": 2, "blocks.0.mlp.fc1.weight": 4, "pos_embed": 8}
        for weight, divisor in shares.items():
            torch.testing.assert_close(decayed[weight] * divisor, plain[weight], rtol=1e-3, atol=1e-5)


def test_weight_decay_spares_vectors_and_muon_turns_matrices_of_blocks_and_stem_alone(recipe: Recipe) -> None:
    plain, decayed = (stepped(recipe, weight_decay=decay) for decay in (0.0, 0.1))
    adamw = stepped(recipe, name="adamw", weight_decay=0.0)
    for name, step in plain.items():
        is_matrix = step.ndim > 1
        if name != "head.weight":  # it starts at zero
            assert torch.equal(step, decayed[name]) == (not is_matrix), name
        by_muon = is_matrix and name.startswith(("blocks.", "patch_embed.backbone."))
        assert torch.equal(step, adamw[name]) == (not by_muon), name
    step = plain["patch_embed.backbone.1.weight"].flatten(1)  # of a stem: filters are the rows of a matrix
    lengths = torch.linalg.svdvals(step)  # Muon's steps go equally far in all directions, AdamW's do not
    assert lengths.min() > 0.4 * lengths.max()


def test_a_second_cycle_is_a_schedule_of_what_is_left() -> None:
    assert [position(step, 40, 0.7) for step in range(28)] == [position(step, 28, 0.0) for step in range(28)]
    assert [position(step, 40, 0.7) for step in (28, 34)] == [(0.0, True), (0.5, True)]
    assert position(9, 10, 0.99) == (0.0, True), "a step is left for it"
    assert position(0, 1, 0.6) == (0.0, False), "one step is one cycle"
