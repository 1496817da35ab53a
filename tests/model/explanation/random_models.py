"""Models of every family with random weights, and the comparison of their maps with a reference."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from model.config import ViTConfig
from model.explanation.explain import explain
from model.network.vit import VisionTransformer
from model.outputs import MapRequest, embedding_width

FAMILIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "registers": {"registers": 3},
    "distilled": {"distillation_token": True, "distillation_head": True},
    "distilled_one_head": {"distillation_token": True},
    "square": {"image_size": (16, 16)},
    "beit": {"relative_position_bias": True, "position_embedding": "none", "layer_scale": True},
    "qk_norm": {"qk_norm": True},
    "swiglu": {"mlp": "swiglu", "activation": "silu"},
    "clip": {"norm_before_blocks": True, "activation": "quick_gelu", "norm_after_pool": True},
    "cls_mean": {"pool": "cls_mean"},
    "mean": {"pool": "mean"},
    "beit_mean": {"pool": "mean", "relative_position_bias": True, "norm_after_pool": True},
    "inner_width": {"attention_width": 12},
    "inner_width_mean": {"attention_width": 36, "pool": "mean"},
    "projected": {"projection_width": 10, "normalized_head": True, "norm_before_blocks": True},
    "normalized": {"pool": "attention", "class_token": False, "normalized_head": True},
    "patch_norms": {"patch_embedding": "linear", "patch_norms": True},
    "post_norm": {"norm_order": "post", "layer_scale": True},
    "res_post_norm": {"norm_order": "res_post", "layer_scale": True},
    "relative_without_cls": {"relative_position_bias": True, "class_token": False, "pool": "mean"},
    "mean_with_prefix": {"pool": "mean", "pool_prefix": True, "registers": 2},
    "max": {"pool": "max"},
    "mean_max": {"pool": "mean_max"},
    "rotary": {
        "rotary": {"reference_grid": (3, 2), "offset": 1.0},
        "registers": 2,
        "position_embedding": "none",
    },
    "rotary_centred_mean": {
        "rotary": {"centred": True, "temperature": 100.0},
        "pool": "mean",
        "qk_norm": True,
    },
    "rotary_learned": {"rotary": {"learned": True}, "layer_scale": True},
    "inner_norms": {
        "mlp": "swiglu",
        "activation": "silu",
        "mlp_norm": True,
        "attention_norm": True,
    },
    "inner_norms_plain": {"mlp_norm": True, "attention_norm": True},
    "inner_norms_mean": {"mlp": "swiglu", "mlp_norm": True, "attention_norm": True, "pool": "mean"},
    "attention": {"pool": "attention", "class_token": False},
    "attention_of_other_heads": {
        "pool": "attention",
        "pool_prefix": True,
        "pool_heads": 4,
        "pool_mlp_width": 16,
    },
    "attention_without_prefix": {"pool": "attention", "registers": 2},
}


def model_of(family: str, **others: Any) -> VisionTransformer:
    """Return a model with random weights without zeros."""
    sizes: dict[str, Any] = {
        "image_size": (16, 24),
        "patch_size": 8,
        "width": 24,
        "depth": 3,
        "heads": 3,
        "mlp_width": 40,
    }
    model = VisionTransformer(
        ViTConfig(**sizes | {"num_classes": 5} | FAMILIES[family] | others)
    ).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.35, generator=generator)
    return model


def pictures(model: VisionTransformer, count: int = 3) -> Tensor:
    return torch.randn(
        (count, 3, *model.config.image_size), generator=torch.Generator().manual_seed(1)
    )


CLASSES = torch.tensor([4, 0, 2])


def directions_for(model: VisionTransformer) -> Tensor:
    """Return rows of a head that reads transfer features, float64 [3, D]."""
    width = embedding_width(model.config, "transfer")
    return torch.randn((3, width), generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def all_tokens(pool: Tensor, config: ViTConfig) -> Tensor:
    """Insert zeros for the tokens that the pooling skips: [B, seen] -> [B, N]."""
    return torch.cat([torch.zeros(len(pool), config.tokens - pool.shape[1]), pool], dim=1)


def require_maps(
    model: VisionTransformer, pixels: Tensor, classes: Tensor, method: str, tokens: Tensor
) -> None:
    """Check the method's maps and masses against tokens, [B, N]."""
    patches = tokens[:, model.config.prefix_tokens :]
    maps, kept = explain(model, pixels, classes, MapRequest(method))
    some = (patches > 0).any(1)
    assert some.any(), "the reference has values to compare"
    expected = patches / patches.sum(1, keepdim=True)
    expected[~some] = 1 / patches.shape[1]
    expected = expected.reshape(-1, *model.config.grid)
    shares = patches.sum(1) / tokens.sum(1)
    torch.testing.assert_close(maps, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(kept[some], shares[some], rtol=0, atol=1e-5)
    torch.testing.assert_close(maps.sum((1, 2)), torch.ones(3))
    assert maps.dtype == torch.float32
    assert (maps >= 0).all()


def require_unchanged_model(method: str) -> None:
    """Check that a method leaves the model's parameters as they were."""
    model = model_of("plain")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    maps, _ = explain(model, pictures(model), CLASSES, MapRequest(method))
    assert not maps.requires_grad
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


def require_maps_of_any_batch(method: str) -> None:
    """Check that an image has the same map alone and in a batch."""
    model = model_of("plain")
    pixels = pictures(model)
    together = explain(model, pixels, CLASSES, MapRequest(method))
    with patch("model.explanation.explain.WEIGHTS_BYTES", 1):
        alone = explain(model, pixels, CLASSES, MapRequest(method))
    torch.testing.assert_close(alone, together)


def maps_of_two_classes(method: str) -> tuple[Tensor, Tensor]:
    """Return the maps of one image for the classes 0 and 1."""
    model = model_of("plain")
    pixels = pictures(model, 1).repeat(2, 1, 1, 1)
    maps, _ = explain(model, pixels, torch.tensor([0, 1]), MapRequest(method))
    return maps[0], maps[1]


def require_even_map_of_zero_head(method: str) -> None:
    """Check that a head of zeros has an even map without mass on patches."""
    model = model_of("plain")
    with torch.no_grad():
        model.head.weight.zero_()
    maps, kept = explain(model, pictures(model), CLASSES, MapRequest(method))
    torch.testing.assert_close(maps, torch.full((3, 2, 3), 1 / 6))
    assert kept.tolist() == [0.0, 0.0, 0.0]
