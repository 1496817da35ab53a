"""The orientation from Exif, read without trusting it.

Nothing else of Exif is read. A general reader builds a table of every tag, and a few kilobytes of overlapping tags can
make such a table take hundreds of megabytes.
"""

from __future__ import annotations

import struct

UPRIGHT = 1
_TAG = 274
_FORMATS = {1: "B", 3: "H", 4: "L"}
"""Format characters of `struct` for the field types of unsigned integers (TIFF 6.0, section 2)."""

_EXIF_PREFIX = b"Exif\0\0"


def read_orientation(exif: bytes | None) -> int:
    """Return the Exif orientation 1...8 (CIPA DC-008, tag 274); 1, upright, where none can be read.

    Args:
        exif: with or without its prefix, which some writers state twice.
    """
    exif = (exif or b"").removeprefix(_EXIF_PREFIX).removeprefix(_EXIF_PREFIX)
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return UPRIGHT
    try:
        (directory,) = struct.unpack_from(order + "L", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHL", exif, entry)
            if tag == _TAG and count:
                (value,) = struct.unpack_from(order + _FORMATS[kind], exif, entry + 8)
                return value if 1 <= value <= 8 else UPRIGHT
    except (struct.error, KeyError):  # cut off, or no integer
        pass
    return UPRIGHT
