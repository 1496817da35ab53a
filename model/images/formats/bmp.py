"""BMP."""

from __future__ import annotations

import re
from typing import Self

from PIL import ImageFile
from PIL.BmpImagePlugin import BmpImageFile

from model.errors import InvalidImage
from model.images.exif import UPRIGHT
from model.images.formats.base import EncodedImage

_MAX_RUN_LENGTH_BYTES = 2_097_152
"""Size of a run-length encoded BMP: Pillow decodes those in Python, run by run."""

_RUN_LENGTH_COST = 30.0
"""Pixels of an 8-bit RGB PNG that take as long to decode as a byte of run lengths."""


class Bmp(EncodedImage):
    """A Windows bitmap."""

    name = "BMP"
    magic = re.compile(rb"BM")
    reader = BmpImageFile

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Self:
        """Refuse a large run-length encoded file."""
        run_length = int.from_bytes(data[30:34], "little") in (1, 2) and data[14:18] != b"\x0c\0\0\0"
        if run_length and len(data) > _MAX_RUN_LENGTH_BYTES:
            raise InvalidImage(f"a run-length encoded BMP of more than {_MAX_RUN_LENGTH_BYTES} bytes is not read")
        return cls(bytes(data), orientation=UPRIGHT)

    def cost(self, image: ImageFile.ImageFile, scale: int) -> float:
        """Return how many pixels of an 8-bit RGB PNG take as long to decode as one of the stored picture, at most."""
        if image.tile[0].codec_name != "bmp_rle":
            return 0.5
        return 0.5 + _RUN_LENGTH_COST * len(self.data) / (image.width * image.height)
