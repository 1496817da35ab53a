"""Maps of tokens: shares, sums, and numbers that are tiny, negative or absent."""

from __future__ import annotations

import numpy as np
import pytest

from model.config import ViTConfig
from model.explanation.maps import Floats, sharpened_maps, token_maps

CONFIG = ViTConfig(image_size=(16, 24), patch_size=8, width=24, depth=1, heads=3, mlp_width=40, num_classes=5)
"""2 x 3 patches after one prefix token."""


def tokens(*rows: list[float]) -> Floats:
    return np.array(rows, np.float32)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-42, 1e30])
def test_the_scale_of_an_image_is_of_no_account(scale: float) -> None:
    found = scale * tokens([2.0, 1.0, 0, 0, 0, 0, 5.0])
    maps, kept = token_maps(found, CONFIG)
    np.testing.assert_allclose(maps, [[[1 / 6, 0, 0], [0, 0, 5 / 6]]], rtol=1e-2)
    np.testing.assert_allclose(kept, [6 / 8], rtol=1e-2)
    sharp, kept = sharpened_maps(found, CONFIG)
    np.testing.assert_allclose(sharp, [[[1 / 26, 0, 0], [0, 0, 25 / 26]]], rtol=1e-2, atol=1e-6)
    np.testing.assert_allclose(kept, [6 / 8], rtol=1e-2)
    assert maps.dtype == sharp.dtype == kept.dtype == np.float32


def test_what_spoke_against_the_class_is_not_shown_and_keeps_nothing() -> None:
    maps, kept = sharpened_maps(tokens([-4.0, -1.0, 3.0, -1.0, -1.0, -1.0, -1.0]), CONFIG)
    assert maps[0, 0, 1] > 0.999
    assert kept.tolist() == [1.0], "neither patches nor the prefix have less than nothing"


def test_where_nothing_spoke_for_it_the_map_is_even_beside_one_that_is_not() -> None:
    maps, kept = sharpened_maps(tokens([1.0, *[-1.0] * 6], [0.0, 1.0, *[0.0] * 5]), CONFIG)
    np.testing.assert_allclose(maps[0], np.full((2, 3), 1 / 6), rtol=1e-6)
    assert maps[1, 0, 0] > 0.999
    assert kept.tolist() == [0.0, 1.0]
    maps, kept = token_maps(np.zeros((1, 7), np.float32), CONFIG)
    np.testing.assert_allclose(maps, np.full((1, 2, 3), 1 / 6), rtol=1e-6)
    assert kept.tolist() == [0.0]
