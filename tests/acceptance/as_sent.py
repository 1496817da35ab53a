"""Pictures as users send them: enlarged and compressed, turned by Exif, without colour.

A model that is right about the files of its data set is of little use if it is wrong about the same pictures after a
phone and a web page have had them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from PIL import Image

from model.data.pictures import PictureFiles

SIDE: Final = 512
"""Longer side of the pictures that are sent, in pixels (bicubic)."""
JPEG_QUALITY: Final = 85

_ORIENTATION_TAG: Final = 274
_STORED_AS: Final = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
"""How a camera stores an upright picture, by Exif orientation (6: to be turned clockwise by 90 degrees)."""


def _as_jpeg(picture: Image.Image, number: int) -> bytes:
    return _encoded(picture)


def _as_turned_jpeg(picture: Image.Image, number: int) -> bytes:
    """Encode the picture stored turned, with its Exif orientation: 3, 6 and 8 in turn."""
    orientation = tuple(_STORED_AS)[number % len(_STORED_AS)]
    exif = Image.Exif()
    exif[_ORIENTATION_TAG] = orientation
    return _encoded(picture.transpose(_STORED_AS[orientation]), exif.tobytes())


def _as_grey_jpeg(picture: Image.Image, number: int) -> bytes:
    return _encoded(picture.convert("L"))


_ENCODINGS: Final[Mapping[str, Callable[[Image.Image, int], bytes]]] = {
    f"{SIDE} px, JPEG {JPEG_QUALITY}": _as_jpeg,
    f"{SIDE} px, JPEG {JPEG_QUALITY}, turned by Exif": _as_turned_jpeg,
    f"{SIDE} px, JPEG {JPEG_QUALITY}, greyscale": _as_grey_jpeg,
}


def as_sent(files: PictureFiles) -> dict[str, PictureFiles]:
    """Return the same pictures as users send them, by what was done to them; the first are as they are.

    The pictures are upright (see `model.data.cifar10`).
    """

    def variant(encode: Callable[[Image.Image, int], bytes]) -> PictureFiles:
        def read(number: int) -> bytes:
            picture = Image.open(io.BytesIO(files.read(number))).convert("RGB")
            factor = SIDE / max(picture.size)
            size = (round(picture.width * factor), round(picture.height * factor))
            return encode(picture.resize(size, Image.Resampling.BICUBIC), number)

        return replace(files, read=read)

    return {"as stored": files, **{name: variant(encode) for name, encode in _ENCODINGS.items()}}


def _encoded(picture: Image.Image, exif: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=JPEG_QUALITY, exif=exif)
    return buffer.getvalue()
