"""Every explanation method against plain autograd through explicit attention matrices, on every
family; attention maps: how heads are combined, which tokens are dropped, and what a mixed batch
gets.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.config import ViTConfig
from model.explanation import methods
from model.explanation.frozen_gradients import through_pooling
from model.explanation.maps import Floats, attention_maps, cls_map, sharpened_maps, token_maps
from model.explanation.methods import EXPLANATIONS, explain
from model.network.vit import VisionTransformer
from model.outputs import CLASS_SPECIFIC, AttentionHead, MapRequest, Method
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
    """A model of random weights, in which every parameter counts."""
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
        start = all_tokens(
            (found.pool * grad_of(found.pool)).clamp(min=0).mean(1)[:, 0], model.config
        )
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
# Of many patches relevance follows several and not one, and of many blocks the last ones: more on a
# coarse grid.
CASES += [
    (family, "relevance", {"image_size": size, "depth": 6})
    for size in ((56, 48), (80, 72))
    for family, options in FAMILIES.items()
    if family != "square" and "norm_order" not in options
]
# Of very many it follows 16, and of many classes a class has ten rivals.
CASES += [("plain", "relevance", {"image_size": (96, 112), "num_classes": 30})]


@pytest.mark.parametrize(("family", "method", "sizes"), CASES)
def test_a_map_is_that_of_plain_autograd(
    family: str, method: Method, sizes: dict[str, Any]
) -> None:
    model = model_of(family, **sizes)
    pixels = pictures(model)
    require_maps(model, pixels, CLASSES, method, PLAIN[method](model, pixels).detach())


@pytest.mark.parametrize("family", ["plain", "distilled", "cls_mean", "attention"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_class_without_ten_rivals_has_fewer_or_none(family: str, count: int) -> None:
    model = model_of(family, image_size=(80, 72), num_classes=count)
    pixels, classes = pictures(model), torch.tensor([0, count - 1, 0])
    require_maps(model, pixels, classes, "relevance", plain_relevance(model, pixels, classes))


def require_maps(
    model: VisionTransformer, pixels: Tensor, classes: Tensor, method: Method, tokens: Tensor
) -> None:
    """The method's maps and masses are those of the tokens, [B, N]."""
    patches = tokens[:, model.config.prefix_tokens :]
    maps, kept = explain(model, pixels, classes, MapRequest(method))
    some = (patches > 0).any(1)
    assert some.any(), "the reference has something to compare"
    expected = patches / patches.sum(1, keepdim=True)
    expected[~some] = 1 / patches.shape[1]
    expected = expected.reshape(-1, *model.config.grid)
    torch.testing.assert_close(maps, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        kept[some], (patches.sum(1) / tokens.sum(1))[some], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(maps.sum((1, 2)), torch.ones(3))
    assert maps.dtype == torch.float32
    assert (maps >= 0).all()


@pytest.mark.parametrize("method", EXPLANATIONS)
def test_an_image_has_the_same_map_in_any_batch(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("plain")
    pixels = pictures(model)
    together = explain(model, pixels, CLASSES, MapRequest(method))
    monkeypatch.setattr(methods, "_WEIGHTS_BYTES", 1)  # one image at a time
    torch.testing.assert_close(explain(model, pixels, CLASSES, MapRequest(method)), together)


@pytest.mark.parametrize("method", EXPLANATIONS)
def test_only_a_class_specific_map_depends_on_the_class(method: Method) -> None:
    model = model_of("plain")
    one, other = explain(
        model, pictures(model, 1).repeat(2, 1, 1, 1), torch.tensor([0, 1]), MapRequest(method)
    )[0]
    assert torch.allclose(one, other) is (method not in CLASS_SPECIFIC)


@pytest.mark.parametrize("family", ["plain", "distilled"])
def test_gae_of_another_heads_class_is_that_of_a_model_with_this_row(family: str) -> None:
    model = model_of(family)
    pixels, rows = (
        pictures(model),
        torch.randn((3, model.config.width), generator=torch.Generator().manual_seed(5)),
    )
    found = explain(model, pixels, rows, MapRequest("gae"))
    with torch.no_grad():
        for head in filter(None, (model.head, model.head_dist)):
            head.weight[:3] = rows
    torch.testing.assert_close(found, explain(model, pixels, torch.arange(3), MapRequest("gae")))


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


CONFIG = ViTConfig(
    image_size=(16, 24), patch_size=8, width=32, depth=3, heads=2, mlp_width=64, num_classes=5
)


def rows(*shape: int) -> NDArray[np.float32]:
    """Attention rows over the CLS token and 2 x 3 patches."""
    values = np.random.default_rng(0).random((*shape, 2, 7), dtype=np.float32)
    shares: NDArray[np.float32] = values / values.sum(axis=-1, keepdims=True)
    return shares


@pytest.mark.parametrize("head", ["mean", "max", 1])
def test_a_map_is_the_combined_row_without_prefix_tokens_divided_by_its_sum(
    head: AttentionHead,
) -> None:
    attention = rows(4)
    combined = {"mean": attention.mean(1), "max": attention.max(1), 1: attention[:, 1]}[head]
    values, kept_mass = cls_map(attention, head=head, prefix_tokens=1, grid=(2, 3))
    np.testing.assert_allclose(kept_mass, combined[:, 1:].sum(-1), rtol=1e-6)
    np.testing.assert_allclose(
        values.reshape(4, -1) * kept_mass[:, None], combined[:, 1:], rtol=1e-6
    )
    assert values.shape == (4, 2, 3)


def test_a_head_that_gives_the_patches_nothing_has_a_finite_map() -> None:
    attention = np.zeros((1, 1, 7), dtype=np.float32)
    attention[..., 0] = 1
    values, kept_mass = cls_map(attention, head=0, prefix_tokens=1, grid=(2, 3))
    assert kept_mass.item() == 0
    assert (values == 0).all()


def test_a_mixed_batch_gets_each_map_from_its_own_image_layer_and_head() -> None:
    attention = rows(4, 2)  # of layers 0 and 2
    requests = [MapRequest.row(2, "max"), None, MapRequest.row(0, 1), MapRequest.row(2, "max")]
    found = attention_maps(attention, (0, 2), requests, CONFIG)
    assert sorted(found) == [0, 2, 3]
    for image, request in enumerate(requests):
        if request is not None:
            assert request.layer is not None
            assert request.head is not None
            row = attention[image, (0, 2).index(request.layer)][None]
            values, kept_mass = cls_map(row, head=request.head, prefix_tokens=1, grid=(2, 3))
            got = found[image]
            assert got.request == request
            np.testing.assert_array_equal(got.values, values[0])
            assert got.kept_mass == kept_mass.item()


TINY = ViTConfig(
    image_size=(16, 24), patch_size=8, width=24, depth=1, heads=3, mlp_width=40, num_classes=5
)
"""2 x 3 patches after one prefix token."""


def tokens(*rows: list[float]) -> Floats:
    return np.array(rows, np.float32)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-42, 1e30])
def test_the_scale_of_an_image_is_of_no_account(scale: float) -> None:
    found = scale * tokens([2.0, 1.0, 0, 0, 0, 0, 5.0])
    maps, kept = token_maps(found, TINY)
    np.testing.assert_allclose(maps, [[[1 / 6, 0, 0], [0, 0, 5 / 6]]], rtol=1e-2)
    np.testing.assert_allclose(kept, [6 / 8], rtol=1e-2)
    sharp, kept = sharpened_maps(found, TINY)
    np.testing.assert_allclose(sharp, [[[1 / 26, 0, 0], [0, 0, 25 / 26]]], rtol=1e-2, atol=1e-6)
    np.testing.assert_allclose(kept, [6 / 8], rtol=1e-2)
    assert maps.dtype == sharp.dtype == kept.dtype == np.float32


def test_what_spoke_against_the_class_is_not_shown_and_keeps_nothing() -> None:
    maps, kept = sharpened_maps(tokens([-4.0, -1.0, 3.0, -1.0, -1.0, -1.0, -1.0]), TINY)
    assert maps[0, 0, 1] > 0.999
    assert kept.tolist() == [1.0], "neither patches nor the prefix have less than nothing"


def test_where_nothing_spoke_for_it_the_map_is_even_beside_one_that_is_not() -> None:
    maps, kept = sharpened_maps(tokens([1.0, *[-1.0] * 6], [0.0, 1.0, *[0.0] * 5]), TINY)
    np.testing.assert_allclose(maps[0], np.full((2, 3), 1 / 6), rtol=1e-6)
    assert maps[1, 0, 0] > 0.999
    assert kept.tolist() == [0.0, 1.0]
    maps, kept = token_maps(np.zeros((1, 7), np.float32), TINY)
    np.testing.assert_allclose(maps, np.full((1, 2, 3), 1 / 6), rtol=1e-6)
    assert kept.tolist() == [0.0]
