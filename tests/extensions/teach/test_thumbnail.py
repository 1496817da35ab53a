"""Thumbnails are small for every picture."""

import io

import numpy as np
import pytest
from PIL import Image

from service.extensions.teach.thumbnail import MAX_BYTES, jpeg_thumbnail


@pytest.mark.parametrize("shape", [(224, 224, 3), (32, 96, 3), (40, 40, 1)])
def test_a_thumbnail_of_noise_is_small(shape: tuple[int, int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    content = jpeg_thumbnail(pixels)
    assert len(content) <= MAX_BYTES
    assert max(Image.open(io.BytesIO(content)).size) == min(64, max(shape))
