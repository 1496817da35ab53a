"""PNG (W3C PNG, third edition, section 5): the header, and the file without what a decoder need not
see.
"""

import zlib

from model.errors import InvalidImage
from model.images.jpeg import MAX_PARTS, read_orientation

_PICTURE_CHUNKS = {b"IHDR", b"PLTE", b"IDAT", b"IEND"}
_MAX_BOUNDED_FILE = 8_388_608
# Pixels, and bytes of all samples: some 0.1 s of deflate's fastest data and of Paeth's filter.
_MAX_BOUNDED_BYTES = 16_777_216

# Samples of a pixel by colour type.
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def is_bounded(data: bytes | bytearray) -> bool:
    """Return whether the header bounds the work of decoding: pixels of moderate size."""
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    bits, colour_type = data[24:25], int.from_bytes(data[25:26], "big")
    pixel_bytes = max(1.0, int.from_bytes(bits, "big") * _CHANNELS.get(colour_type, 4) / 8)
    return (
        data[12:16] == b"IHDR"
        and len(data) <= _MAX_BOUNDED_FILE
        and width * height * pixel_bytes <= _MAX_BOUNDED_BYTES
    )


def strip(data: bytes | bytearray) -> tuple[bytes, int]:
    """Return the file without ancillary chunks, and the orientation that stands in them.

    IDAT chunks that do not follow the first at once are left out, too.

    Raises:
        InvalidImage: a wrong checksum of the pixels, a second header, or absurdly many chunks.
    """
    view = memoryview(data)
    kept = [view[:8]]
    exif = None
    position, previous, pixels_ended = 8, b"", False
    for _ in range(MAX_PARTS):
        body, kind = position + 8, bytes(view[position + 4 : position + 8])
        end = body + 4 + int.from_bytes(view[position : position + 4], "big")
        pixels_ended = pixels_ended or (previous == b"IDAT" and kind != b"IDAT")
        if (
            kind == b"IHDR" and position > 8
        ):  # Pillow takes the last header, whatever the first declares.
            raise InvalidImage("the PNG picture does not decode: its header is not its first chunk")
        is_whole = kind == b"IDAT" and end <= len(data)
        if is_whole and zlib.crc32(view[body - 4 : end - 4]) != int.from_bytes(
            view[end - 4 : end], "big"
        ):
            raise InvalidImage(
                "the PNG picture does not decode: the checksum of its pixels is wrong"
            )
        if (kind in _PICTURE_CHUNKS or len(kind) < 4) and not (kind == b"IDAT" and pixels_ended):
            kept.append(view[position:end])
        elif kind == b"eXIf":
            exif = bytes(view[body : end - 4])
        position, previous = end, kind
        if kind == b"IEND" or position >= len(data):
            return b"".join(kept), read_orientation(exif)
    raise InvalidImage(f"the file is made of more than {MAX_PARTS} parts")
