"""Formats whose files go to the decoder as they are: BMP, and WebP (RFC 9649)."""

from __future__ import annotations

import re
from typing import Self

from PIL import features
from PIL.BmpImagePlugin import BmpImageFile
from PIL.WebPImagePlugin import WebPImageFile

from model.errors import InvalidImage
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


class WebP(EncodedImage):
    """A WebP file, whose size is read here: libwebp allocates the canvas when it opens the file."""

    name = "WEBP"
    magic = re.compile(rb"RIFF.{4}WEBP", re.DOTALL)
    reader = WebPImageFile if features.check("webp") else None
    unsupported = "WebP pictures are not supported: this Pillow is built without libwebp"

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Self:
        """Read the size of the canvas."""
        kind, head = data[12:16], data[20:30]
        size = None
        if kind == b"VP8X" and len(head) == 10:
            size = int.from_bytes(head[4:7], "little") + 1, int.from_bytes(head[7:10], "little") + 1
        elif kind == b"VP8L" and head[:1] == b"\x2f" and len(head) >= 5:
            bits = int.from_bytes(head[1:5], "little")
            size = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        elif kind == b"VP8 " and head[3:6] == b"\x9d\x01\x2a" and len(head) == 10:
            size = int.from_bytes(head[6:8], "little") & 0x3FFF, int.from_bytes(head[8:10], "little") & 0x3FFF
        if size is None:
            raise InvalidImage("the WebP header is cut off or corrupt")
        return cls(bytes(data), size=size)
