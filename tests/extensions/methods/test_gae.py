"""Generic attention explainability against whole matrices and plain autograd, on every family."""

import pytest
import torch
from torch import Tensor

from model.explanation.explain import explain
from model.extensions.methods.gae import gae, gae_of_transfer
from model.network.vit import VisionTransformer
from model.outputs import MapRequest
from tests.model.blocks import blocks
from tests.model.explanation.plain_reference import (
    Reference,
    attention_weights,
    first_row,
    forward,
)
from tests.model.explanation.random_models import (
    CLASSES,
    FAMILIES,
    all_tokens,
    directions_for,
    maps_of_two_classes,
    model_of,
    pictures,
    require_even_map_of_zero_head,
    require_maps,
    require_maps_of_any_batch,
    require_unchanged_model,
)


def gradients(model: VisionTransformer, pixels: Tensor) -> Reference:
    found = forward(model, pixels)
    found.logits[torch.arange(len(pixels)), CLASSES].sum().backward()
    return found


def grad_of(weights: Tensor | None) -> Tensor:
    assert weights is not None
    return torch.zeros_like(weights) if weights.grad is None else weights.grad


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


@pytest.mark.parametrize("family", FAMILIES)
def test_map_is_that_of_plain_autograd(family: str) -> None:
    model = model_of(family)
    pixels = pictures(model)
    require_maps(model, pixels, CLASSES, "gae", plain_gae(model, pixels).detach())


def test_image_has_the_same_map_in_any_batch() -> None:
    require_maps_of_any_batch("gae")


def test_map_depends_on_the_class() -> None:
    one, other = maps_of_two_classes("gae")
    assert not torch.allclose(one, other)


def test_head_of_zeros_has_an_even_map() -> None:
    require_even_map_of_zero_head("gae")


def test_model_is_unchanged() -> None:
    require_unchanged_model("gae")


@pytest.mark.parametrize("family", ["plain", "distilled"])
def test_row_of_another_head_is_a_class(family: str) -> None:
    model = model_of(family)
    pixels = pictures(model)
    rows = torch.randn((3, model.config.width), generator=torch.Generator().manual_seed(5))
    result = explain(model, pixels, rows, MapRequest("gae"))
    with torch.no_grad():
        for head in filter(None, (model.head, model.head_dist)):
            head.weight[:3] = rows
    torch.testing.assert_close(result, explain(model, pixels, torch.arange(3), MapRequest("gae")))


@pytest.mark.parametrize(
    "family", ["plain", "distilled", "relative_without_cls", "post_norm", "clip"]
)
def test_each_part_is_added_where_it_is_read(family: str) -> None:
    model = model_of(family, depth=4).double()
    pixels = pictures(model).double()
    directions = directions_for(model)
    relevance = gae_of_transfer(model, pixels, directions)
    expected = plain_transfer_gae(model, pixels, directions)
    torch.testing.assert_close(relevance.double(), expected, rtol=1e-4, atol=1e-5)


def test_models_own_head_may_read_parts() -> None:
    model = model_of("plain", pool="transfer", depth=4).double()
    pixels = pictures(model).double()
    rows = model.head.weight.detach()[CLASSES]
    expected = plain_transfer_gae(model, pixels, rows)
    for targets in (CLASSES, rows):
        relevance = gae(model, pixels, targets, "head")
        torch.testing.assert_close(relevance.double(), expected, rtol=1e-4, atol=1e-5)


def plain_transfer_gae(model: VisionTransformer, pixels: Tensor, directions: Tensor) -> Tensor:
    """Return generic attention explainability of transfer features from whole matrices: [B, N]."""
    config = model.config
    x = model.embed(pixels)
    weights = []
    outputs = []
    for block in blocks(model):
        attention = attention_weights(block.attn, block.attention_input(x))
        attention.retain_grad()
        values = block.attn.project(block.attention_input(x))[2]
        mixed = (attention @ values).transpose(1, 2).flatten(2)
        x = block.finish(block.attended(x, block.attn.proj(block.attn.norm(mixed))))
        weights.append(attention)
        outputs.append(x)
    read = range(config.depth)[-3:]
    parts = [(index, config.class_token) for index in read]
    if config.class_token:
        parts.append((config.depth - 1, False))
    total = torch.zeros((), dtype=torch.float64)
    rows: dict[int, list[Tensor]] = {index: [] for index in read}
    for (index, is_token), part in zip(parts, directions.split(config.width, dim=1), strict=True):
        normed = model.norm(outputs[index])
        pooled = normed[:, 0] if is_token else normed[:, config.prefix_tokens :].mean(1)
        total = total + (model.fc_norm(pooled) * part).sum()
        row = torch.zeros(len(pixels), config.tokens, dtype=torch.float64)
        row[:, slice(0, 1) if is_token else slice(config.prefix_tokens, None)] = 1
        rows[index].append(row / row.sum(1, keepdim=True))
    total.backward()
    found = torch.zeros(len(pixels), config.tokens, dtype=torch.float64)
    for index in reversed(range(config.depth)):
        found = found + sum(rows.get(index, []), torch.zeros(()))
        gradient = weights[index].grad
        assert gradient is not None
        found = found + torch.einsum(
            "bq,bqk->bk", found, (weights[index] * gradient).clamp(min=0).mean(1).detach()
        )
    return found
