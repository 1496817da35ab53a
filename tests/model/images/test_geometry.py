"""Sizes as numbers, without decoding a picture."""

from __future__ import annotations

import pytest

from model.images.preprocess import min_decoded_size, resized_size
from tests.model.images.pictures import config


@pytest.mark.parametrize(
    ("how", "resize_size", "source", "expected"),
    [
        ("squash", (20, 30), (77, 55), (30, 20)),
        ("shortest_edge", (32, 32), (64, 48), (42, 32)),
        ("shortest_edge", (32, 32), (48, 64), (32, 42)),
        ("shortest_edge", (32, 32), (50, 50), (32, 32)),
        ("shortest_edge", (20, 30), (60, 60), (30, 30)),
        ("shortest_edge", (20, 30), (90, 30), (60, 20)),
    ],
)
def test_the_size_that_a_picture_is_resized_to(how, resize_size, source, expected):
    chosen = config((16, 16), resize_size, resize=how)
    width, height = source
    assert resized_size(width, height, chosen) == expected
    assert min_decoded_size(chosen)(width, height) == (2 * expected[0], 2 * expected[1])
