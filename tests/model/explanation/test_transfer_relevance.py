"""Relevance of a class that reads several blocks, against automatic differentiation in float64."""

import pytest
import torch
from torch import Tensor

from model.explanation.methods import gae_of_transfer
from model.explanation.transfer_relevance import kept_for_transfer, transfer_relevance
from model.network.vit import VisionTransformer
from model.outputs import embedding_width
from tests.model.blocks import blocks
from tests.model.explanation.plain_reference import attention_weights
from tests.model.explanation.plain_relevance import plain_transfer_relevance
from tests.model.explanation.test_methods import FAMILIES, model_of, pictures

PRE_NORM = [family for family, options in FAMILIES.items() if "norm_order" not in options]


def directions_for(model: VisionTransformer) -> Tensor:
    width = embedding_width(model.config, "transfer")
    return torch.randn((3, width), generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@pytest.mark.parametrize("family", PRE_NORM)
@pytest.mark.parametrize("size", [(24, 32), (80, 72)], ids=["coarse", "fine"])
def test_relevance_is_that_of_autograd(family: str, size: tuple[int, int]) -> None:
    model = model_of(family, image_size=size, depth=5).double()
    pixels, directions = pictures(model).double(), directions_for(model)
    with torch.no_grad():
        output = model(pixels, keep=kept_for_transfer(model.config), transfer=True)
    found = transfer_relevance(model, output, directions)
    expected = plain_transfer_relevance(model, pixels, directions)
    scale = expected.abs().amax(dim=1, keepdim=True)
    torch.testing.assert_close(found.double() / scale, expected / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shallow_network_has_fewer_parts(depth: int) -> None:
    model = model_of("plain", depth=depth).double()
    pixels, directions = pictures(model).double(), directions_for(model)
    with torch.no_grad():
        output = model(pixels, keep=kept_for_transfer(model.config), transfer=True)
    found, expected = (
        transfer_relevance(model, output, directions),
        plain_transfer_relevance(model, pixels, directions),
    )
    torch.testing.assert_close(
        found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
    )


@pytest.mark.parametrize(
    "family", ["plain", "distilled", "relative_without_cls", "post_norm", "clip"]
)
def test_gae_adds_each_part_where_it_is_read(family: str) -> None:
    model = model_of(family, depth=4).double()
    pixels, directions = pictures(model).double(), directions_for(model)
    found, expected = (
        gae_of_transfer(model, pixels, directions),
        plain_gae(model, pixels, directions),
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def plain_gae(model: VisionTransformer, pixels: Tensor, directions: Tensor) -> Tensor:
    """Generic attention explainability with whole matrices, a part at a time but for its gradient."""
    config, x, weights, outputs = model.config, model.embed(pixels), [], []
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
