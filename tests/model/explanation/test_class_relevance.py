"""Relevance for transfer features, against automatic differentiation in float64."""

import pytest
import torch

from model.explanation.class_relevance import (
    class_relevance,
    kept_for_class,
    kept_for_transfer,
    transfer_relevance,
)
from model.explanation.folded_weights import fold
from tests.model.explanation.plain_relevance import plain_transfer_relevance
from tests.model.explanation.random_models import (
    CLASSES,
    FAMILIES,
    directions_for,
    model_of,
    pictures,
)

PRE_NORM = [family for family, options in FAMILIES.items() if "norm_order" not in options]


SIZES = ((24, 32), (80, 72))
"""A coarse and a fine grid of patches."""


@pytest.mark.parametrize(
    ("family", "size"),
    [(family, SIZES[number % 2]) for number, family in enumerate(PRE_NORM)]
    + [("plain", size) for size in SIZES],
)
def test_relevance_is_that_of_autograd(family: str, size: tuple[int, int]) -> None:
    model = model_of(family, image_size=size, depth=5).double()
    pixels = pictures(model).double()
    directions = directions_for(model)
    with torch.no_grad():
        output = model(pixels, keep=kept_for_transfer(model.config), transfer=True)
    relevance = transfer_relevance(model, output, directions)
    expected = plain_transfer_relevance(model, pixels, directions)
    scale = expected.abs().amax(dim=1, keepdim=True)
    torch.testing.assert_close(relevance.double() / scale, expected / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shallow_network_has_fewer_parts(depth: int) -> None:
    model = model_of("plain", depth=depth).double()
    pixels = pictures(model).double()
    directions = directions_for(model)
    with torch.no_grad():
        output = model(pixels, keep=kept_for_transfer(model.config), transfer=True)
    relevance = transfer_relevance(model, output, directions)
    expected = plain_transfer_relevance(model, pixels, directions)
    limit = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(relevance.double(), expected, rtol=1e-4, atol=limit)


@pytest.mark.parametrize("class_token", [True, False], ids=["cls", "patches"])
def test_relevance_starts_with_the_margin(class_token: bool) -> None:
    model = model_of("plain", pool="transfer", depth=5, class_token=class_token).double()
    pixels = pictures(model).double()
    with torch.no_grad():
        output = model(pixels, keep=kept_for_class(model.config))
    relevance = class_relevance(model, output, fold(model), CLASSES).double()
    rows = model.head.weight.detach()
    rivals = (rows.sum(dim=0) - rows[CLASSES]) / (len(rows) - 1)
    expected = plain_transfer_relevance(model, pixels, rows[CLASSES] - rivals)
    # The scale of an image's relevance does not matter.
    relevance = relevance / relevance.norm(dim=1, keepdim=True)
    expected = expected / expected.norm(dim=1, keepdim=True)
    torch.testing.assert_close(relevance, expected, rtol=0, atol=1e-5)
