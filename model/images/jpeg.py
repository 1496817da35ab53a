"""JPEG (ITU-T T.81, annex B): its header, its segments without metadata, its Exif orientation.

A multi-picture MPO begins with a whole JPEG and is read as JPEG. `model.images.decode` chooses the
scale of decoding.
"""

import re
import struct
import sys
from collections.abc import Iterator
from itertools import islice

from model.errors import InvalidImage, UnsupportedImageFormat

UPRIGHT = 1
# Format characters of `struct` for the field types of unsigned integers (TIFF 6.0, section 2).
_FORMATS = {1: "B", 3: "H", 4: "L"}

# Most segments or chunks of a file. Valid files have at most a few thousand.
MAX_PARTS = 16_384

_MARKER = re.compile(rb"\xff[^\x00\xff]")
# Markers without a length field, in libjpeg's and Pillow's view: TEM, RST, SOI, EOI and the
# reserved JPGn.
_STANDALONE = {0x01, *range(0xD0, 0xDA), 0xC8, *range(0xF0, 0xFE)}

_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_ARITHMETIC = {marker for marker in _FRAMES if marker > 0xC8}
_SEQUENTIAL = {0xC0, 0xC1}
_PROGRESSIVE = {0xC2}
_SCAN = 0xDA
_APP1 = 0xE1
_METADATA = {*range(0xE0, 0xF0), 0xFE}
# Application segments that give the colour space of the components.
_COLOUR_SEGMENTS = (b"JFIF\0", b"Adobe")

_EXIF = b"Exif\0\0"

_MAX_BOUNDED_SEGMENTS = 256
_MAX_BOUNDED_FILE = 16_777_216
# Photos of 24 megapixels pass. They decode in 0.1 to 0.3 s.
_MAX_BOUNDED_PIXELS = 26_000_000

# Most bytes between two segments of a bounded file. Valid files have at most a few fill bytes.
_MAX_GAP = 16


def is_bounded(data: bytes | bytearray) -> bool:
    """Return whether the header bounds the decoding work: one Huffman-coded scan of moderate size.

    A file with several scans, such as a progressive file, is not bounded. It may have any number of
    scans, and each covers the whole picture.
    """
    frame = b""
    for marker, _, start, end in islice(_segments(data, _MAX_GAP), _MAX_BOUNDED_SEGMENTS):
        if marker == _SCAN:
            height = int.from_bytes(frame[3:5], "big")
            width = int.from_bytes(frame[5:7], "big")
            return (
                frame[2:3] == b"\x08"
                and width * height <= _MAX_BOUNDED_PIXELS
                and len(data) <= _MAX_BOUNDED_FILE
                and data[start + 2 : start + 3] >= frame[7:8]  # the scan has all components
            )
        if marker in _FRAMES:
            if marker not in _SEQUENTIAL:
                return False
            frame = bytes(data[start:end])
    return False


def strip(data: bytes | bytearray) -> tuple[bytes, int]:
    """Return the file without application segments and comments, and the orientation from them.

    Raises:
        InvalidImage: the file has too many segments, or its frame is lossless or hierarchical.
        UnsupportedImageFormat: arithmetic coding; its decoder reads zeros past the end of the data
            forever.
    """
    view = memoryview(data)
    kept = [view[:2]]
    exif = None
    for marker, begin, start, end in _segments(data, sys.maxsize):
        if marker == _SCAN:
            kept.append(view[begin:])
            break
        if marker in _ARITHMETIC:
            raise UnsupportedImageFormat(
                "JPEG pictures with arithmetic coding are not read: no browser shows them"
            )
        if marker in _FRAMES - _SEQUENTIAL - _PROGRESSIVE:
            raise InvalidImage("the JPEG picture does not decode: it is lossless or hierarchical")
        if marker not in _METADATA or data.startswith(_COLOUR_SEGMENTS, start + 2):
            kept.append(view[begin:end])
        elif exif is None and marker == _APP1 and data.startswith(_EXIF, start + 2):
            exif = bytes(view[start + 2 : end])
    return b"".join(kept), read_orientation(exif)


def _segments(data: bytes | bytearray, max_gap: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (marker, begin, start of payload, end) of each segment, up to a gap above `max_gap`.

    Fill bytes and other bytes before a marker are legal. Pillow skips them one by one in Python.
    """
    size = len(data)
    position = 2
    for _ in range(MAX_PARTS):
        begin = position
        if begin + 2 > size or data[begin] != 0xFF or data[begin + 1] in (0x00, 0xFF):
            match = _MARKER.search(data, position, min(position + max_gap, size))
            if match is None:
                return
            begin = match.start()
        marker = data[begin + 1]
        start = begin + 2
        position = start
        if marker not in _STANDALONE:
            length = data[start] << 8 | data[start + 1] if start + 2 <= size else 0
            position += length if length > 2 else 2
        yield marker, begin, start, position
    raise InvalidImage(f"the file is made of more than {MAX_PARTS} parts")


def read_orientation(exif: bytes | None) -> int:
    """Return the Exif orientation 1...8 (CIPA DC-008, tag 274); 1, upright, if it is unreadable.

    This function reads no other tag. A general reader builds a table of all tags, and a few
    kilobytes of overlapping tags can make that table take hundreds of megabytes.

    Args:
        exif: with or without its prefix, which some writers repeat.
    """
    exif = (exif or b"").removeprefix(_EXIF).removeprefix(_EXIF)
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return UPRIGHT
    try:
        (directory,) = struct.unpack_from(order + "L", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHL", exif, entry)
            if tag == 274 and count:
                (value,) = struct.unpack_from(order + _FORMATS[kind], exif, entry + 8)
                return value if 1 <= value <= 8 else UPRIGHT
    except (struct.error, KeyError):  # truncated, or not an integer
        pass
    return UPRIGHT
