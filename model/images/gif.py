"""The size of a GIF's canvas, from the headers of its frames."""

import struct
from typing import Final

from model.errors import InvalidImage
from model.images.formats import MAX_PARTS

# Above `MAX_PARTS`, blocks must have this many bytes on average; most have 256.
_LEAST_BLOCK_BYTES: Final = 64


def canvas_size(data: bytes | bytearray) -> tuple[int, int]:
    """Return the size of the canvas that holds all frames of a GIF (GIF89a).

    A player would allocate that canvas.

    Raises:
        InvalidImage: the file has too many small blocks.
    """
    width = 0
    height = 0
    blocks_left = MAX_PARTS + len(data) // _LEAST_BLOCK_BYTES
    try:
        canvas_width, canvas_height, flags = struct.unpack_from("<HHB", data, 6)
        position = 13 + _palette_bytes(flags)
        while (kind := data[position]) in b"!,":
            blocks_left -= 1
            position += 2
            if kind == ord(","):
                left, top, columns, rows, flags = struct.unpack_from("<HHHHB", data, position - 1)
                width = max(width, canvas_width, left + columns)
                height = max(height, canvas_height, top + rows)
                position += 9 + _palette_bytes(flags)
            while (block := data[position]) and blocks_left > 0:
                position += 1 + block
                blocks_left -= 1
            if blocks_left <= 0:
                raise InvalidImage("the file is made of too many parts: send one frame of the GIF")
            position += 1
    except (struct.error, IndexError):  # truncated; the decoder checks the first frame
        pass
    return width, height


def _palette_bytes(flags: int) -> int:
    """Return the bytes of a palette, from the flags of a GIF's screen or frame."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0
