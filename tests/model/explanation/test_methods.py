"""Every explanation method against plain autograd through explicit attention matrices, on every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ViTConfig
from model.explanation import methods
from model.explanation.frozen_gradients import through_pooling
from model.explanation.methods import EXPLANATIONS, explain
from model.network.vit import VisionTransformer
from model.outputs import CLASS_SPECIFIC, MapRequest, Method
from tests.model.explanation.plain_reference import Reference, first_row, forward
from tests.model.explanation.plain_relevance import plain_relevance

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
    "rotary": {"rotary": {"reference_grid": (3, 2), "offset": 1.0}, "registers": 2, "position_embedding": "none"},
    "rotary_centred_mean": {"rotary": {"centred": True, "temperature": 100.0}, "pool": "mean", "qk_norm": True},
    "rotary_learned": {"rotary": {"learned": True}, "layer_scale": True},
    "inner_norms": {"mlp": "swiglu", "activation": "silu", "mlp_norm": True, "attention_norm": True},
    "inner_norms_plain": {"mlp_norm": True, "attention_norm": True},
    "inner_norms_mean": {"mlp": "swiglu", "mlp_norm": True, "attention_norm": True, "pool": "mean"},
    "attention": {"pool": "attention", "class_token": False},
    "attention_of_other_heads": {"pool": "attention", "pool_prefix": True, "pool_heads": 4, "pool_mlp_width": 16},
    "attention_without_prefix": {"pool": "attention", "registers": 2},
}


def model_of(family: str, **others: Any) -> VisionTransformer:
    """A model of random weights, in which every parameter counts."""
    sizes: dict[str, Any] = {
        "image_size": (16, 24),
        "patch_size": 8,
        "width": 24,
        "depth": 3,
        "heads": 3,
        "mlp_width": 40,
    }
    model = VisionTransformer(ViTConfig(**sizes | {"num_classes": 5} | FAMILIES[family] | others)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.35, generator=generator)
    return model


def pictures(model: VisionTransformer, count: int = 3) -> Tensor:
    return torch.randn((count, 3, *model.config.image_size), generator=torch.Generator().manual_seed(1))


CLASSES = torch.tensor([4, 0, 2])


def gradients(model: VisionTransformer, pixels: Tensor) -> Reference:
    found = forward(model, pixels)
    found.logits[torch.arange(len(pixels)), CLASSES].sum().backward()
    return found


def grad_of(weights: Tensor | None) -> Tensor:
    assert weights is not None
    return torch.zeros_like(weights) if weights.grad is None else weights.grad


def all_tokens(pool: Tensor, config: ViTConfig) -> Tensor:
    """[B, seen] -> [B, N]: what the pooling does not see has nothing."""
    return torch.cat([torch.zeros(len(pool), config.tokens - pool.shape[1]), pool], dim=1)


def plain_gae(model: VisionTransformer, pixels: Tensor) -> Tensor:
    found = gradients(model, pixels)
    matrix = torch.eye(model.config.tokens).repeat(len(pixels), 1, 1)
    for weights in found.attention:
        matrix = matrix + (weights * grad_of(weights)).clamp(min=0).mean(1) @ matrix
    start = first_row(model.config, len(pixels))
    if found.pool is not None:
        start = all_tokens((found.pool * grad_of(found.pool)).clamp(min=0).mean(1)[:, 0], model.config)
    return torch.einsum("bq,bqk->bk", start, matrix)


def plain_rollout(model: VisionTransformer, pixels: Tensor) -> Tensor:
    found = forward(model, pixels)
    rows = []
    for image in range(len(pixels)):
        product = torch.eye(model.config.tokens)
        for weights in found.attention:
            mixed = (weights[image].detach().mean(0) + torch.eye(model.config.tokens)) / 2
            product = mixed / mixed.sum(1, keepdim=True) @ product
        start = first_row(model.config, 1)
        if found.pool is not None:
            start = all_tokens(found.pool[image].detach().mean(0), model.config)
            start = start / start.sum()
        rows.append(start @ product)
    return torch.cat(rows)


PLAIN: dict[str, Callable[[VisionTransformer, Tensor], Tensor]] = {
    "relevance": lambda model, pixels: plain_relevance(model, pixels, CLASSES),
    "gae": plain_gae,
    "rollout": plain_rollout,
}


CASES: list[tuple[str, str, dict[str, Any]]] = [
    (family, method, {})
    for family, options in FAMILIES.items()
    for method in PLAIN
    if method != "relevance" or "norm_order" not in options
]
# Of many patches relevance follows several and not one, and of many blocks the last ones: more on a coarse grid.
CASES += [
    (family, "relevance", {"image_size": size, "depth": 6})
    for size in ((56, 48), (80, 72))
    for family, options in FAMILIES.items()
    if family != "square" and "norm_order" not in options
]
# Of very many it follows 16, and of many classes a class has ten rivals.
CASES += [("plain", "relevance", {"image_size": (96, 112), "num_classes": 30})]


@pytest.mark.parametrize(("family", "method", "sizes"), CASES)
def test_a_map_is_that_of_plain_autograd(family: str, method: Method, sizes: dict[str, Any]) -> None:
    model = model_of(family, **sizes)
    pixels = pictures(model)
    require_maps(model, pixels, CLASSES, method, PLAIN[method](model, pixels).detach())


@pytest.mark.parametrize("family", ["plain", "distilled", "cls_mean", "attention"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_class_without_ten_rivals_has_fewer_or_none(family: str, count: int) -> None:
    model = model_of(family, image_size=(80, 72), num_classes=count)
    pixels, classes = pictures(model), torch.tensor([0, count - 1, 0])
    require_maps(model, pixels, classes, "relevance", plain_relevance(model, pixels, classes))


def require_maps(model: VisionTransformer, pixels: Tensor, classes: Tensor, method: Method, tokens: Tensor) -> None:
    """The method's maps and masses are those of the tokens, [B, N]."""
    patches = tokens[:, model.config.prefix_tokens :]
    maps, kept = explain(model, pixels, classes, MapRequest(method))
    some = (patches > 0).any(1)
    assert some.any(), "the reference has something to compare"
    expected = patches / patches.sum(1, keepdim=True)
    expected[~some] = 1 / patches.shape[1]
    expected = expected.reshape(-1, *model.config.grid)
    torch.testing.assert_close(maps, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(kept[some], (patches.sum(1) / tokens.sum(1))[some], rtol=0, atol=1e-5)
    torch.testing.assert_close(maps.sum((1, 2)), torch.ones(3))
    assert maps.dtype == torch.float32
    assert (maps >= 0).all()


@pytest.mark.parametrize("method", EXPLANATIONS)
def test_an_image_has_the_same_map_in_any_batch(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("plain")
    pixels = pictures(model)
    together = explain(model, pixels, CLASSES, MapRequest(method))
    monkeypatch.setattr(methods, "_WEIGHTS_BYTES", 1)  # one image at a time
    torch.testing.assert_close(explain(model, pixels, CLASSES, MapRequest(method)), together)


@pytest.mark.parametrize("method", EXPLANATIONS)
def test_only_a_class_specific_map_depends_on_the_class(method: Method) -> None:
    model = model_of("plain")
    one, other = explain(model, pictures(model, 1).repeat(2, 1, 1, 1), torch.tensor([0, 1]), MapRequest(method))[0]
    assert torch.allclose(one, other) is (method not in CLASS_SPECIFIC)


@pytest.mark.parametrize("method", ["relevance", "gae"])
def test_where_nothing_is_found_the_map_is_even(method: Method) -> None:
    model = model_of("plain")
    with torch.no_grad():
        model.head.weight.zero_()
    maps, kept = explain(model, pictures(model), CLASSES, MapRequest(method))
    torch.testing.assert_close(maps, torch.full((3, 2, 3), 1 / 6))
    assert kept.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("method", EXPLANATIONS)
def test_the_model_is_left_as_it_was(method: Method) -> None:
    model = model_of("plain")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    maps, _ = explain(model, pictures(model), CLASSES, MapRequest(method))
    assert not maps.requires_grad
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


def test_tokens_with_the_same_highest_value_share_its_gradient() -> None:
    config = model_of("max").config
    skipped = config.prefix_tokens
    x = torch.zeros(1, config.tokens, config.width)
    x[0, skipped : skipped + 2, 0] = 5.0  # the highest of the first feature, twice
    x[0, skipped, 1:] = 1.0
    gradient = torch.full((1, 1, config.width), 4.0)
    found = through_pooling(x, gradient, config)
    assert found[0, skipped : skipped + 2, 0].tolist() == [2.0, 2.0]
    assert found[0, skipped, 1:].tolist() == [4.0] * (config.width - 1)
    assert found.sum().item() == 4.0 * config.width
