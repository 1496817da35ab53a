from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from model.evaluation.evaluation_set import UPLOADS, as_grey_jpeg, as_jpeg, as_png, as_turned_jpeg
from model.images.preprocess import preprocess
from tests.model.data.configs import bicubic_config

CONFIG = bicubic_config(32, 32)


@pytest.fixture
def pixels() -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
    """A smooth picture of which no turn looks like another."""
    y, x = np.mgrid[0:32, 0:32]
    return np.stack([8 * x, 8 * y, np.hypot(x - 5, y - 9) * 6], axis=-1).clip(0, 255).astype(np.uint8)


def test_a_png_comes_back_as_it_was(pixels: np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]) -> None:
    np.testing.assert_array_equal(preprocess(as_png(pixels), CONFIG), pixels)


def test_pictures_are_what_they_are_called(pixels: np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]) -> None:
    with Image.open(io.BytesIO(as_jpeg(pixels))) as picture:
        assert (picture.format, picture.mode, picture.size) == ("JPEG", "RGB", (512, 512))
    with Image.open(io.BytesIO(as_grey_jpeg(pixels))) as picture:
        assert (picture.format, picture.mode, picture.size) == ("JPEG", "L", (512, 512))
    assert next(iter(UPLOADS.values())) is as_png


@pytest.mark.parametrize(("number", "orientation"), [(0, 3), (1, 6), (2, 8), (3, 3)])
def test_turned_pictures_say_so_and_are_upright_again_for_pil_and_for_the_service(
    number: int, orientation: int, pixels: np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]
) -> None:
    data = as_turned_jpeg(pixels, number)
    upright = preprocess(as_jpeg(pixels), CONFIG).astype(int)
    with Image.open(io.BytesIO(data)) as picture:
        assert picture.getexif()[274] == orientation
        as_stored = np.asarray(picture.resize((32, 32), Image.Resampling.BICUBIC)).astype(int)
        by_pil = np.asarray(ImageOps.exif_transpose(picture).resize((32, 32), Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(by_pil - upright).mean() < 3
    assert np.abs(preprocess(data, CONFIG).astype(int) - upright).mean() < 3
    assert np.abs(as_stored - upright).mean() > 20


def test_an_oblong_picture_keeps_its_shape() -> None:
    with Image.open(io.BytesIO(as_jpeg(np.zeros((10, 20, 3), np.uint8)))) as picture:
        assert picture.size == (512, 256)
