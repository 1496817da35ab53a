"""Attention rollout against whole matrices, on every family."""

import pytest
import torch
from torch import Tensor

from model.extensions.methods.rollout import rollout
from model.network.vit import VisionTransformer, blocks_of
from tests.model.explanation.plain_reference import attention_weights, first_row, forward
from tests.model.explanation.random_models import (
    CLASSES,
    FAMILIES,
    all_tokens,
    maps_of_two_classes,
    model_of,
    pictures,
    require_maps,
    require_maps_of_any_batch,
    require_unchanged_model,
)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_map_is_that_of_whole_matrices(family: str) -> None:
    model = model_of(family)
    pixels = pictures(model)
    require_maps(model, pixels, CLASSES, "rollout", plain_rollout(model, pixels))


def test_image_has_the_same_map_in_any_batch() -> None:
    require_maps_of_any_batch("rollout")


def test_map_is_the_same_for_every_class() -> None:
    one, other = maps_of_two_classes("rollout")
    assert torch.allclose(one, other)


def test_model_is_unchanged() -> None:
    require_unchanged_model("rollout")


@pytest.mark.parametrize("class_token", [True, False], ids=["cls", "patches"])
def test_transfer_maps_follow_their_blocks(class_token: bool) -> None:
    model = model_of("plain", pool="transfer", depth=4, class_token=class_token)
    pixels = pictures(model)
    config = model.config
    identity = torch.eye(config.tokens)
    products = [identity.expand(len(pixels), -1, -1)]
    for weights in plain_attention(model, pixels):
        products.append((weights.mean(dim=1) + identity) / 2 @ products[-1])
    patches = slice(config.prefix_tokens, None)
    read = [(block, slice(0, 1) if class_token else patches) for block in (2, 3, 4)]
    if class_token:
        read.append((4, patches))
    rows = [products[block][:, tokens].mean(dim=1) for block, tokens in read]
    mean = torch.stack(rows).mean(dim=0)
    torch.testing.assert_close(rollout(model, pixels, CLASSES, "head"), mean)


@torch.no_grad()
def plain_attention(model: VisionTransformer, pixels: Tensor) -> list[Tensor]:
    """Return the attention of each block, [B, heads, N, N]."""
    x = model.embed(pixels)
    attention = []
    for block in blocks_of(model):
        attention.append(attention_weights(block.attn, block.norm1(x)))
        x = block(x)[0]
    return attention
