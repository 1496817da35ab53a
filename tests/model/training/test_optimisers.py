from __future__ import annotations

import pytest
import torch

from model.training.loop import layer_of, optimiser_of, rate_factor
from model.training.recipe import Recipe
from model.training.train import start_from
from tests.model.training.runs import changed
from tests.model.training.synthetic import LABELS


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


def stepped(recipe: Recipe, **fields: object) -> dict[str, torch.Tensor]:
    """Change of each weight in one update by the same gradients."""
    recipe = changed(recipe, **fields)
    model = start_from(recipe, LABELS).build().requires_grad_(True)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = 5 + torch.randn(parameter.shape, generator=generator)
    optimiser = optimiser_of(model, recipe)
    for group in optimiser.param_groups:
        group["lr"] = group["peak"]
    optimiser.step()
    return {name: weight - before[name] for name, weight in model.state_dict().items()}


def test_steps_shrink_by_one_factor_a_layer_from_the_head_down(recipe: Recipe) -> None:
    plain = stepped(recipe, weight_decay=0.0)
    decayed = stepped(recipe, weight_decay=0.0, layer_decay=0.5)
    shares = {"head.weight": 1, "blocks.1.attn.qkv.bias": 2, "blocks.0.mlp.fc1.weight": 4, "pos_embed": 8}
    for weight, divisor in shares.items():
        torch.testing.assert_close(decayed[weight] * divisor, plain[weight], rtol=1e-3, atol=1e-5)


def test_weight_decay_spares_vectors(recipe: Recipe) -> None:
    plain, decayed = (stepped(recipe, weight_decay=decay) for decay in (0.0, 0.1))
    for name, step in plain.items():
        if name != "head.weight":  # it starts at zero
            assert torch.equal(step, decayed[name]) == (step.ndim < 2), name


def test_the_rate_rises_then_falls_to_zero() -> None:
    factors = [rate_factor(step / 1000, 0.1) for step in range(1001)]
    assert factors.index(max(factors)) == 100
    assert max(factors) == pytest.approx(1.0)
    assert factors[:101] == sorted(factors[:101])
    assert factors[100:] == sorted(factors[100:], reverse=True)
    assert factors[0] > 0
    assert factors[-1] == pytest.approx(0.0, abs=1e-9)
    assert rate_factor(0.0, 0.0) == pytest.approx(1.0)
