from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.config import ViTConfig
from model.network.vit import VisionTransformer
from model.training.optimisers import layer_of, make_optimisers
from model.training.recipe import Optimiser

DEPTH = 3


@pytest.fixture
def weights() -> dict[str, Tensor]:
    config = ViTConfig(
        image_size=(16, 16),
        patch_size=8,
        width=16,
        depth=DEPTH,
        heads=2,
        mlp_width=32,
        num_classes=4,
        registers=2,
        norm_before_blocks=True,
    )
    return {name: p.detach() for name, p in VisionTransformer(config).named_parameters()}


def settings(**changes: object) -> Optimiser:
    return Optimiser.model_validate({"learning_rate": 1e-3, "muon_learning_rate": 5e-3, **changes})


def rates(optimisers: list[torch.optim.Optimizer], weights: dict[str, Tensor]) -> dict[str, float]:
    names = {id(weight): name for name, weight in weights.items()}
    return {
        names[id(weight)]: group["lr"] for o in optimisers for group in o.param_groups for weight in group["params"]
    }


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("patch_embed.proj.weight", 0),
        ("cls_token", 0),
        ("dist_token", 0),
        ("reg_token", 0),
        ("pos_embed", 0),
        ("norm_pre.weight", 0),
        ("blocks.0.attn.qkv.weight", 1),
        ("blocks.11.mlp.fc2.bias", 12),
        ("norm.weight", 13),
        ("fc_norm.bias", 13),
        ("attn_pool.latent", 13),
        ("head.weight", 13),
        ("head_dist.bias", 13),
    ],
)
def test_layers_are_numbered_as_in_beit(name: str, layer: int) -> None:
    assert layer_of(name, 12) == layer


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_rate_falls_by_one_factor_a_layer_from_the_head_down(name: str, weights: dict[str, Tensor]) -> None:
    found = rates(make_optimisers(weights, settings(name=name, layer_decay=0.5), DEPTH), weights)
    assert found.keys() == weights.keys()  # each exactly once: a duplicate would be refused by torch
    matrices = 5e-3 if name == "muon" else 1e-3
    assert found["head.weight"] == found["norm.bias"] == 1e-3
    assert found["blocks.2.attn.qkv.bias"] == pytest.approx(1e-3 / 2)
    assert found["blocks.2.attn.qkv.weight"] == pytest.approx(matrices / 2)
    assert found["blocks.0.mlp.fc1.weight"] == pytest.approx(matrices / 8)
    assert found["pos_embed"] == found["reg_token"] == found["norm_pre.weight"] == pytest.approx(1e-3 / 16)


@pytest.mark.parametrize("decay", [1.0, 0.7])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_spares_vectors_alone(name: str, decay: float, weights: dict[str, Tensor]) -> None:
    optimisers = make_optimisers(weights, settings(name=name, weight_decay=0.1, layer_decay=decay), DEPTH)
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            for weight in group["params"]:
                assert group["weight_decay"] == (0.1 if weight.ndim > 1 else 0.0)


def test_without_layer_decay_groups_are_those_of_earlier_states(weights: dict[str, Tensor]) -> None:
    adamw, muon = make_optimisers(weights, settings(), DEPTH)
    assert [len(group["params"]) for group in adamw.param_groups] == [
        len([n for n, w in weights.items() if w.ndim > 1 and not n.startswith("blocks.")]),
        len([w for w in weights.values() if w.ndim == 1]),
    ]
    assert [len(group["params"]) for group in muon.param_groups] == [4 * DEPTH]
