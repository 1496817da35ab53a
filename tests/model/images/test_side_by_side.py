"""Several drawings in one picture."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from model.images.heatmap import MAX_SIZE
from model.images.side_by_side import side_by_side


def drawing(colour: tuple[int, int, int], size: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def test_drawings_stand_in_order_with_white_between() -> None:
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    joined = Image.open(io.BytesIO(side_by_side([drawing(colour, (10, 6)) for colour in colours])))
    assert (joined.format, joined.mode, joined.size) == ("PNG", "RGB", (38, 6))
    pixels = np.asarray(joined)
    for place, colour in enumerate(colours):
        assert (pixels[:, 14 * place : 14 * place + 10] == colour).all()
    assert (pixels[:, 10:14] == 255).all()


@pytest.mark.parametrize("count", [2, 8])
def test_together_they_are_never_wider_than_one_may_be(count: int) -> None:
    joined = Image.open(io.BytesIO(side_by_side([drawing((1, 2, 3), (2048, 1024))] * count)))
    assert MAX_SIZE - count < joined.width <= MAX_SIZE
    assert joined.height == pytest.approx(joined.width / count / 2, abs=2)


def test_flat_drawings_keep_a_row_of_pixels() -> None:
    joined = Image.open(io.BytesIO(side_by_side([drawing((1, 2, 3), (2048, 1))] * 4)))
    assert joined.size == (4 * ((2048 - 12) // 4) + 12, 1)
