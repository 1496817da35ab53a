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

SIDE: Final = 512
"""Longer side of the enlarged pictures in pixels (bicubic)."""
QUALITY: Final = 85
"""Of the JPEGs."""

_ORIENTATION_TAG: Final = 274
_STORED_AS: Final = {
    3: Image.Transpose.ROTATE_180,
    6: Image.Transpose.ROTATE_90,
    8: Image.Transpose.ROTATE_270,
}
"""How a camera stores an upright picture under this Exif orientation (6: to be turned clockwise by 90 degrees)."""

Upload = Callable[[NDArray[np.uint8], int], bytes]
"""uint8 [H, W, 3] and the picture's number -> the bytes of a file."""


def as_png(pixels: NDArray[np.uint8], number: int = 0) -> bytes:
    """As it is; PNG loses nothing."""
    return _encoded(Image.fromarray(np.ascontiguousarray(pixels)), "png")


def as_jpeg(pixels: NDArray[np.uint8], number: int = 0) -> bytes:
    """Enlarged to `SIDE`, as a JPEG."""
    return _encoded(_enlarged(pixels), "jpeg")


def as_turned_jpeg(pixels: NDArray[np.uint8], number: int) -> bytes:
    """The same, stored turned with an Exif orientation that says so: 3, 6 and 8 in turn."""
    orientation = tuple(_STORED_AS)[number % len(_STORED_AS)]
    exif = Image.Exif()
    exif[_ORIENTATION_TAG] = orientation
    return _encoded(_enlarged(pixels).transpose(_STORED_AS[orientation]), "jpeg", exif=exif.tobytes())


def as_grey_jpeg(pixels: NDArray[np.uint8], number: int = 0) -> bytes:
    """Enlarged to `SIDE`, as a JPEG of one channel."""
    return _encoded(_enlarged(pixels).convert("L"), "jpeg")


UPLOADS: Final[Mapping[str, Upload]] = {
    "as stored, PNG": as_png,
    f"{SIDE} px, JPEG {QUALITY}": as_jpeg,
    f"{SIDE} px, JPEG {QUALITY}, turned by Exif": as_turned_jpeg,
    f"{SIDE} px, JPEG {QUALITY}, greyscale": as_grey_jpeg,
}
"""What is measured, the pictures as they are first."""


def _enlarged(pixels: NDArray[np.uint8]) -> Image.Image:
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    factor = SIDE / max(picture.size)
    size = (round(picture.width * factor), round(picture.height * factor))
    return picture.resize(size, Image.Resampling.BICUBIC)


def _encoded(picture: Image.Image, kind: str, exif: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    if kind == "png":
        picture.save(buffer, "png")
    else:
        picture.save(buffer, "jpeg", quality=QUALITY, exif=exif)
    return buffer.getvalue()
