"""PNG (W3C PNG, third edition, section 5)."""

from __future__ import annotations

import re
import zlib
from typing import Self

from PIL.PngImagePlugin import PngImageFile

from model.errors import InvalidImage
from model.images.exif import read_orientation
from model.images.formats.base import EncodedImage, bounded_parts

_PICTURE_CHUNKS = {b"IHDR", b"PLTE", b"IDAT", b"IEND"}
_TEXT_CHUNKS = {b"tEXt", b"zTXt", b"iTXt"}
_XMP_KEYWORD = b"XML:com.adobe.xmp\0"
_RAW_PROFILE_KEYWORD = b"Raw profile type exif\0"

_MAX_PROFILE_BYTES = 65_536
"""Digits of an Exif block that ImageMagick hid in a text chunk, of which the first counts."""

_MAX_BOUNDED_CHUNKS = 2_048
_MAX_BOUNDED_FILE = 8_388_608
_MAX_BOUNDED_PIXELS = 16_777_216
"""Pixels, and bytes of all samples: some 0.1 s of deflate's fastest data and of Paeth's filter."""

_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Samples of a pixel by colour type."""


class Png(EncodedImage):
    """A PNG file without its ancillary chunks, and without IDAT chunks that do not follow the first at once."""

    name = "PNG"
    magic = re.compile(rb"\x89PNG\r\n\x1a\n")
    reader = PngImageFile
    may_be_bounded = True

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Self:
        """Keep the chunks of the picture; read the orientation from the others."""
        view = memoryview(data)
        kept = [view[:8]]
        exif = raw_profile = xmp = None
        position = first = 8  # kept chunks that follow one another are kept as one slice
        pixels_ended = False
        previous = b""
        bounded = False
        for number in bounded_parts():
            bounded = number < _MAX_BOUNDED_CHUNKS
            length = int.from_bytes(view[position : position + 4], "big")
            kind = bytes(view[position + 4 : position + 8])
            body, end = position + 8, position + 12 + length
            pixels_ended = pixels_ended or (previous == b"IDAT" and kind != b"IDAT")
            previous = kind
            if kind == b"IHDR" and position > 8:
                # Pillow takes the last header, whatever the first declares.
                raise InvalidImage("the PNG picture does not decode: its header is not its first chunk")
            is_whole = kind == b"IDAT" and end <= len(data)
            if is_whole and zlib.crc32(view[body - 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
                raise InvalidImage("the PNG picture does not decode: the checksum of its pixels is wrong")
            if (kind not in _PICTURE_CHUNKS and len(kind) == 4) or (kind == b"IDAT" and pixels_ended):
                kept.append(view[first:position])
                first = end
                if kind == b"eXIf":
                    exif = bytes(view[body : end - 4])
                elif kind in _TEXT_CHUNKS and data.startswith(_XMP_KEYWORD, body):
                    xmp = bytes(view[body : end - 4])
                elif raw_profile is None and kind in _TEXT_CHUNKS and data.startswith(_RAW_PROFILE_KEYWORD, body):
                    text = bytes(view[body + len(_RAW_PROFILE_KEYWORD) : end - 4])
                    raw_profile = _raw_profile(text, compressed=kind == b"zTXt")
            position = end
            if kind == b"IEND" or position >= len(data):
                break
        kept.append(view[first:position])
        picture = b"".join(kept)
        width, height = int.from_bytes(picture[16:20], "big"), int.from_bytes(picture[20:24], "big")
        bounded = (
            bounded
            and picture[12:16] == b"IHDR"
            and len(picture) <= _MAX_BOUNDED_FILE
            and width * height * max(1, _pixel_bytes(picture)) <= _MAX_BOUNDED_PIXELS
        )
        return cls(picture, orientation=read_orientation(exif or raw_profile, xmp), bounded=bounded)


def _pixel_bytes(picture: bytes) -> float:
    """Return the bytes of a pixel of a PNG, of which its header stands in the first chunk."""
    return int.from_bytes(picture[24:25], "big") * _CHANNELS.get(int.from_bytes(picture[25:26], "big"), 4) / 8


def _raw_profile(text: bytes, *, compressed: bool) -> bytes:
    """Return Exif as ImageMagick wrote it before PNG had a chunk for it: hexadecimal digits in a text chunk."""
    try:
        if compressed:
            text = zlib.decompressobj().decompress(text[1:], _MAX_PROFILE_BYTES)
        # A line break, the name, the length, then the digits, of which there may be more than are read.
        digits = b"".join(text[:_MAX_PROFILE_BYTES].split(b"\n")[3:])
        return bytes.fromhex(digits[: len(digits) // 2 * 2].decode("ascii"))
    except (ValueError, zlib.error):
        return b""
