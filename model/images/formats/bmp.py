"""BMP."""

from __future__ import annotations

import re
from typing import Self

from PIL.BmpImagePlugin import BmpImageFile

from model.images.exif import UPRIGHT
from model.images.formats.base import EncodedImage


class Bmp(EncodedImage):
    """A Windows bitmap."""

    name = "BMP"
    magic = re.compile(rb"BM")
    reader = BmpImageFile

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Self:
        """Return the file as it is."""
        return cls(bytes(data), orientation=UPRIGHT)
