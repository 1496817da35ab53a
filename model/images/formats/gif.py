"""GIF (GIF89a specification)."""

from __future__ import annotations

import re
import struct
from typing import Self

from PIL.GifImagePlugin import GifImageFile

from model.errors import InvalidImage
from model.images.exif import UPRIGHT
from model.images.formats.base import MAX_PARTS, EncodedImage

_HEADER_BYTES = 13
_BLOCK = re.compile(rb"[!,;]")
_GRAPHIC_CONTROL = b"\xf9"
_NO_DISPOSAL = 0b1110_0011
"""Clears the bits of a graphic control block that say what becomes of the frame before the next one."""

_MAX_SIDE = 65_535
"""What the header can say of a side."""


class Gif(EncodedImage):
    """A GIF file without the blocks before its first frame, on a canvas that the frame fits."""

    name = "GIF"
    magic = re.compile(rb"GIF8[79]a")
    reader = GifImageFile

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Self:
        """Find the first frame; measure the canvas that all frames need, which a player would allocate."""
        if len(data) < _HEADER_BYTES:
            raise InvalidImage("the GIF header is cut off")
        width, height, flags = struct.unpack_from("<HHB", data, 6)
        position = _HEADER_BYTES + _palette_bytes(flags)
        header = bytearray(data[:position])
        control = bytearray()
        first = None
        for _ in range(MAX_PARTS):
            match = _BLOCK.search(data, position)
            if match is None or match[0] == b";":
                break
            block = match.start()
            if match[0] == b",":
                if len(data) < block + 10:
                    break
                left, top, columns, rows, flags = struct.unpack_from("<HHHHB", data, block + 1)
                width, height = max(width, left + columns), max(height, top + rows)
                position = _chain_end(data, block + 11 + _palette_bytes(flags))
                if first is None:
                    first = block
                    # Pillow would enlarge the canvas by itself, but only within a limit of the whole process.
                    struct.pack_into("<HH", header, 6, min(width, _MAX_SIDE), min(height, _MAX_SIDE))
            else:
                position = _chain_end(data, block + 2)
                if first is None and data[block + 1 : block + 2] == _GRAPHIC_CONTROL:
                    control = bytearray(data[block:position])
        if first is None:
            raise InvalidImage("the GIF file holds no picture")
        if len(control) > 3:
            control[3] &= _NO_DISPOSAL
        return cls(b"".join((header, control, memoryview(data)[first:])), orientation=UPRIGHT, size=(width, height))


def _palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _chain_end(data: bytes | bytearray, position: int) -> int:
    """Return where the chain of data blocks at `position` ends; the end of the file if it is too long."""
    for _ in range(MAX_PARTS):
        if position >= len(data):
            break
        length = data[position]
        position += 1 + length
        if length == 0:
            return position
    return len(data)
