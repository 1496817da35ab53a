"""Rows of drawings and contact sheets."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from model.images.sheet import ContactSheet

COLOURS = ["red", "lime", "blue", "yellow", "cyan"]


def picture(colour: str, size: tuple[int, int] = (60, 40)) -> Image.Image:
    return Image.new("RGB", size, colour)


def places(image: Image.Image, colour: str) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = np.nonzero((np.asarray(image) == np.asarray(picture(colour, (1, 1)))).all(axis=-1))
    return rows, columns


def test_a_sheet_shows_every_picture_in_reading_order_with_its_caption() -> None:
    sheet = ContactSheet(5, (60, 40))
    size = sheet.image.size
    for colour in COLOURS:
        sheet.add(picture(colour), "a file", "a label")
    pixels = np.asarray(sheet.image)
    assert sheet.image.size == size
    corners = []
    for colour in COLOURS:
        rows, columns = places(sheet.image, colour)
        assert (np.ptp(columns) + 1) / (np.ptp(rows) + 1) == pytest.approx(1.5, abs=0.02)
        assert len(rows) == (np.ptp(rows) + 1) * (np.ptp(columns) + 1), "nothing lies over the picture"
        below = pixels[rows.max() + 1 : rows.max() + 40, columns.min() : columns.max()]
        assert (below < 128).any(), "a caption stands below it"
        corners.append((rows.min(), columns.min()))
    assert corners == sorted(corners)


@pytest.mark.parametrize("size", [(100, 200), (10, 1000), (2000, 20)])
def test_a_picture_of_another_shape_is_fitted_and_not_stretched(size: tuple[int, int]) -> None:
    sheet = ContactSheet(1, (60, 40))
    sheet.add(picture("red", size))
    rows, columns = places(sheet.image, "red")
    wanted = max(1, round(size[0] * min(480 / size[0], 320 / size[1])))
    assert int(np.ptp(columns)) + 1 == pytest.approx(wanted, abs=1)
    assert int(columns.min()) == pytest.approx(8 + (480 - wanted) // 2, abs=1)
    assert len(rows)


@pytest.mark.parametrize("shape", [(60, 40), (384, 384), (1600, 400)])
def test_a_sheet_of_many_pictures_is_no_larger_than_8192_pixels_and_uses_them(shape: tuple[int, int]) -> None:
    assert 0.9 * 8192 < max(ContactSheet(2000, shape).image.size) <= 8192 + 8


def test_a_long_caption_is_cut_to_its_cell() -> None:
    sheet = ContactSheet(2, (60, 40))
    sheet.add(picture("red"), "W" * 500)
    red = places(sheet.image, "red")[1]
    inked = np.nonzero((np.asarray(sheet.image) < 64).all(axis=-1))[1]
    assert red.max() - 20 < inked.max() <= red.max()
