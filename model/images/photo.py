"""The whole upright photo of an upload, small enough to be drawn on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.errors import InvalidImage
from model.images.colour import converter
from model.images.decode import DECODE_ERRORS, DEFAULT_MAX_PIXELS, OnSize, decode
from model.images.preprocess import TRANSPOSE
from model.images.region import Region
from model.images.resize import resize

_MAX_DEFAULT_SIZE = 1024
"""Longer side in pixels, at most, where no size is asked for."""


def upright_photo(
    data: bytes | bytearray,
    region: Region,
    size: int | None = None,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    scaled_decode: bool = True,
    on_size: OnSize = lambda _: None,
) -> tuple[NDArray[np.uint8], Region]:
    """Return the photo in an uploaded file, shrunk where it is larger than `size` and turned upright.

    It needs the memory that `model.images.preprocess.model_input` needs, and that of the result.

    Args:
        region: in pixels of the upright original.
        size: the longer side in pixels, at most; None: 1024.
        max_pixels, on_size: see `model_input`.
        scaled_decode: decode large JPEGs at the smallest of 1/8, 1/4 and 1/2 that is not below the result's size.

    Returns:
        uint8 [H, W, 3] RGB, and where in it the region lies.

    Raises:
        ImageError: as `model_input`.
    """
    longer = _MAX_DEFAULT_SIZE if size is None else size

    def shrunk(width: int, height: int) -> tuple[int, int]:
        factor = min(1.0, longer / max(width, height))
        return max(1, round(width * factor)), max(1, round(height * factor))

    decoded = decode(data, max_pixels=max_pixels, min_size=shrunk if scaled_decode else None, on_size=on_size)
    try:
        stored = (decoded.size[0] / decoded.scale, decoded.size[1] / decoded.scale)
        small = resize(
            decoded.image,
            shrunk(*decoded.size),
            (0.0, 0.0, *stored),
            Image.Resampling.BICUBIC,
            convert=converter(decoded.image, "RGB"),
        ).convert("RGB")
    except DECODE_ERRORS as error:
        raise InvalidImage(f"the picture's pixels cannot be converted: {error}") from error
    width, height = decoded.size
    if decoded.orientation >= 5:
        width, height = height, width
    if decoded.orientation in TRANSPOSE:
        small = small.transpose(TRANSPOSE[decoded.orientation])
    across, down = small.width / width, small.height / height
    return np.asarray(small), Region(region.x * across, region.y * down, region.width * across, region.height * down)
