"""Attention rollout against whole matrices, on every family."""

import pytest
import torch
from torch import Tensor

from model.network.vit import VisionTransformer
from tests.model.explanation.plain_reference import first_row, forward
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
