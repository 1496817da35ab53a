"""Test pictures as users send them: enlarged and compressed, turned by Exif, without colour.

A model that is right about the files of its data set is of little use if it is wrong about the same
pictures after a phone and a web page have had them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ENLARGED_SIDE: Final = 512
"""Longer side of the enlarged pictures in pixels (bicubic)."""
JPEG_QUALITY: Final = 85
"""Quality of the JPEGs."""

_ORIENTATION_TAG: Final = 274
_STORED_AS: Final = {
    3: Image.Transpose.ROTATE_180,
    6: Image.Transpose.ROTATE_90,
    8: Image.Transpose.ROTATE_270,
}
"""How a camera stores an upright picture, by Exif orientation (6: to be turned clockwise by 90 degrees)."""

Upload = Callable[[NDArray[np.uint8], int], bytes]
"""Takes uint8 [H, W, 3] and the picture's number; returns the bytes of a file."""


def as_png(pixels: NDArray[np.uint8], number: int = 0) -> bytes:
    """Encode a picture as it is; PNG loses nothing."""
    return _encoded(Image.fromarray(np.ascontiguousarray(pixels)), "png")


def as_jpeg(pixels: NDArray[np.uint8], number: int = 0) -> bytes:
    """Enlarge a picture to `ENLARGED_SIDE` and encode it as a JPEG."""
    return _encoded(_enlarged(pixels), "jpeg")


def as_turned_jpeg(pixels: NDArray[np.uint8], number: int) -> bytes:
    """Encode as `as_jpeg`, but with the picture stored turned and its Exif orientation: 3, 6 and 8 in turn."""
    orientation = tuple(_STORED_AS)[number % len(_STORED_AS)]
    exif = Image.Exif()
    exif[_ORIENTATION_TAG] = orientation
    return _encoded(_enlarged(pixels).transpose(_STORED_AS[orientation]), "jpeg", exif=exif.tobytes())


def as_grey_jpeg(pixels: NDArray[np.uint8], number: int = 0) -> bytes:
    """Enlarge a picture to `ENLARGED_SIDE` and encode it as a JPEG of a single channel."""
    return _encoded(_enlarged(pixels).convert("L"), "jpeg")


UPLOADS: Final[Mapping[str, Upload]] = {
    "as stored, PNG": as_png,
    f"{ENLARGED_SIDE} px, JPEG {JPEG_QUALITY}": as_jpeg,
    f"{ENLARGED_SIDE} px, JPEG {JPEG_QUALITY}, turned by Exif": as_turned_jpeg,
    f"{ENLARGED_SIDE} px, JPEG {JPEG_QUALITY}, greyscale": as_grey_jpeg,
}
"""The variants that are measured; the first are the pictures as they are."""


def _enlarged(pixels: NDArray[np.uint8]) -> Image.Image:
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    factor = ENLARGED_SIDE / max(picture.size)
    size = (round(picture.width * factor), round(picture.height * factor))
    return picture.resize(size, Image.Resampling.BICUBIC)


def _encoded(picture: Image.Image, kind: str, exif: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    if kind == "png":
        picture.save(buffer, "png")
    else:
        picture.save(buffer, "jpeg", quality=JPEG_QUALITY, exif=exif)
    return buffer.getvalue()
