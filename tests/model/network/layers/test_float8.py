"""Linear layers in FP8: how far they are from bfloat16's, and where they compute in bfloat16 after all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from model.network.layers.float8 import Float8Linear, linear_rows, quantised_rows


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(192, 64, dtype=torch.bfloat16).requires_grad_(False)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, 192, dtype=torch.bfloat16)


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def test_the_product_is_that_of_the_quantised_rows(layer: nn.Linear, x: Tensor) -> None:
    found = Float8Linear(layer)(x)
    assert (found.dtype, found.shape) == (torch.bfloat16, (2, 5, 64))
    (a, scale_a), (b, scale_b) = quantised_rows(x.flatten(0, 1)), quantised_rows(layer.weight)
    expected = (a.double() * scale_a) @ (b.double() * scale_b).T + layer.bias.double()
    assert off(found.flatten(0, 1), expected) < 0.005  # half a step of bfloat16 is at most 0.004


def test_it_is_a_few_percent_off_and_a_large_row_does_not_spoil_the_others(layer: nn.Linear, x: Tensor) -> None:
    x[0, 0] *= 1e6
    expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    found = Float8Linear(layer)(x)
    for row in range(5):
        assert 0.005 < off(found[0, row], expected[0, row]) < 0.06


def test_zeros_stay_zero_and_what_is_not_finite_spoils_its_own_row_alone() -> None:
    x = torch.ones(4, 16, dtype=torch.bfloat16)
    x[1], x[2, 3], x[3, 3] = 0, torch.nan, torch.inf
    quantised, scale = quantised_rows(x)
    found = quantised.float() * scale
    assert found[0].tolist() == [1.0] * 16
    assert found[1].tolist() == [0.0] * 16
    assert found[2].isnan().all()
    assert found[3].isnan().all()


def test_some_rows_of_the_output_are_those_rows(layer: nn.Linear, x: Tensor) -> None:
    made = Float8Linear(layer)
    for rows in (slice(16), slice(16, None)):
        torch.testing.assert_close(linear_rows(made, x, rows), made(x)[..., rows])
        torch.testing.assert_close(linear_rows(layer, x, rows), layer(x)[..., rows])


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_and_exact_products_are_the_weights_own(bias: bool, x: Tensor) -> None:
    layer = nn.Linear(192, 64, bias=bias, dtype=torch.bfloat16)
    made, expected = Float8Linear(layer), layer(x)
    assert made.weight is layer.weight
    assert not torch.equal(made(x.detach()), expected)
    assert torch.equal(made(x.requires_grad_()), expected)
    made(x).sum().backward()
    assert x.grad is not None
    made.exact = True
    assert torch.equal(made(x.detach()), expected)
