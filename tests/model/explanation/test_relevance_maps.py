"""Relevance against automatic differentiation with explicit attention matrices, on every family."""

from typing import Any

import pytest
import torch

from model.explanation.frozen_gradients import through_pooling
from tests.model.explanation.plain_relevance import plain_relevance
from tests.model.explanation.random_models import (
    CLASSES,
    FAMILIES,
    maps_of_two_classes,
    model_of,
    pictures,
    require_even_map_of_zero_head,
    require_maps,
    require_maps_of_any_batch,
    require_unchanged_model,
)

PRE_NORM = [family for family, options in FAMILIES.items() if "norm_order" not in options]
CASES: list[tuple[str, dict[str, Any]]] = [(family, {}) for family in PRE_NORM]
# With many patches, relevance follows several tokens, through more blocks on a coarse grid. Each
# family has one of two fine grids.
CASES += [
    (family, {"image_size": ((56, 48), (80, 72))[number % 2], "depth": 6})
    for number, family in enumerate(PRE_NORM)
    if family != "square"
]
# With very many patches, relevance follows 16 tokens. With many classes, a class has ten rivals.
CASES += [("plain", {"image_size": (96, 112), "num_classes": 30})]


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_map_is_that_of_plain_autograd(family: str, sizes: dict[str, Any]) -> None:
    model = model_of(family, **sizes)
    pixels = pictures(model)
    expected = plain_relevance(model, pixels, CLASSES).detach()
    require_maps(model, pixels, CLASSES, "relevance", expected)


@pytest.mark.parametrize("family", ["plain", "distilled", "cls_mean", "attention"])
@pytest.mark.parametrize("count", [1, 2])
def test_few_classes_have_fewer_rivals(family: str, count: int) -> None:
    model = model_of(family, image_size=(80, 72), num_classes=count)
    pixels = pictures(model)
    classes = torch.tensor([0, count - 1, 0])
    require_maps(model, pixels, classes, "relevance", plain_relevance(model, pixels, classes))


def test_image_has_the_same_map_in_any_batch() -> None:
    require_maps_of_any_batch("relevance")


def test_map_depends_on_the_class() -> None:
    one, other = maps_of_two_classes("relevance")
    assert not torch.allclose(one, other)


def test_head_of_zeros_has_an_even_map() -> None:
    require_even_map_of_zero_head("relevance")


def test_model_is_unchanged() -> None:
    require_unchanged_model("relevance")


def test_equal_maxima_share_the_gradient() -> None:
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
