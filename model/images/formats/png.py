"""PNG (W3C PNG, third edition, section 5)."""

from __future__ import annotations

import re
import zlib
from typing import Self

from PIL import ImageFile
from PIL.PngImagePlugin import PngImageFile

from model.images.exif import read_orientation
from model.images.formats.base import EncodedImage, bounded_parts

_PICTURE_CHUNKS = {b"IHDR", b"PLTE", b"IDAT", b"IEND"}
_TEXT_CHUNKS = {b"tEXt", b"zTXt", b"iTXt"}
_XMP_KEYWORD = b"XML:com.adobe.xmp\0"
_RAW_PROFILE_KEYWORD = b"Raw profile type exif\0"

_MAX_PROFILE_BYTES = 1_048_576
"""Size of an Exif block that ImageMagick hid in a text chunk."""


class Png(EncodedImage):
    """A PNG file without its ancillary chunks."""

    name = "PNG"
    magic = re.compile(rb"\x89PNG\r\n\x1a\n")
    reader = PngImageFile
    piece_bytes = 4096  # deflate turns a byte into up to 1032

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Self:
        """Keep the chunks of the picture; read the orientation from the others."""
        view = memoryview(data)
        kept = [view[:8]]
        exif = raw_profile = xmp = None
        position = first = 8  # kept chunks that follow one another are kept as one slice
        for _ in bounded_parts():
            length = int.from_bytes(view[position : position + 4], "big")
            kind = bytes(view[position + 4 : position + 8])
            body, end = position + 8, position + 12 + length
            if kind not in _PICTURE_CHUNKS and len(kind) == 4:
                kept.append(view[first:position])
                first = end
                if kind == b"eXIf":
                    exif = bytes(view[body : end - 4])
                elif kind in _TEXT_CHUNKS and data.startswith(_XMP_KEYWORD, body):
                    xmp = bytes(view[body : end - 4])
                elif kind in _TEXT_CHUNKS and data.startswith(_RAW_PROFILE_KEYWORD, body):
                    text = bytes(view[body + len(_RAW_PROFILE_KEYWORD) : end - 4])
                    raw_profile = _raw_profile(text, compressed=kind == b"zTXt")
            position = end
            if kind == b"IEND" or position >= len(data):
                break
        kept.append(view[first:position])
        return cls(b"".join(kept), orientation=read_orientation(exif or raw_profile, xmp))

    def cost(self, image: ImageFile.ImageFile, scale: int) -> float:
        """Return how many pixels of an 8-bit RGB PNG take as long to decode as one of the stored picture, at most."""
        sample_bytes = 2 if "16" in str(image.tile[0].args) else 1
        return sample_bytes * len(image.getbands()) / 3


def _raw_profile(text: bytes, *, compressed: bool) -> bytes | None:
    """Return Exif as ImageMagick wrote it before PNG had a chunk for it: hexadecimal digits in a text chunk."""
    try:
        if compressed:
            text = zlib.decompressobj().decompress(text[1:], _MAX_PROFILE_BYTES)
        # A line break, the name, the length, then the digits.
        return bytes.fromhex(b"".join(text[:_MAX_PROFILE_BYTES].split(b"\n")[3:]).decode("ascii"))
    except (ValueError, zlib.error):
        return None
