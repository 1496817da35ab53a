"""The orientation from Exif or XMP, read without trusting either.

Nothing else of Exif is read. A general reader builds a table of every tag, and a few kilobytes of overlapping tags can
make such a table take hundreds of megabytes.
"""

from __future__ import annotations

import re
import struct

UPRIGHT = 1
_TAG = 274
_FORMATS = {1: "B", 3: "H", 4: "L"}
"""Format characters of `struct` for the field types of unsigned integers (TIFF 6.0, section 2)."""

_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_EXIF_PREFIX = b"Exif\0\0"


def read_orientation(exif: bytes | None, xmp: bytes | None = None) -> int:
    """Return the Exif orientation 1...8 (CIPA DC-008, tag 274); 1, upright, where none can be read.

    As in `PIL.ImageOps.exif_transpose`, XMP counts only where Exif, with or without its prefix, has no such tag.
    """
    # Some writers state the prefix twice.
    stated = _stated((exif or b"").removeprefix(_EXIF_PREFIX).removeprefix(_EXIF_PREFIX))
    if stated is None:
        match = _XMP.search(xmp or b"")
        stated = int(match[1]) if match else UPRIGHT
    return stated if 1 <= stated <= 8 else UPRIGHT


def _stated(exif: bytes) -> int | None:
    """Return the value of the tag in the first directory of an Exif block; None where there is no such tag."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return None
    try:
        (directory,) = struct.unpack_from(order + "L", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHL", exif, entry)
            if tag == _TAG:
                return struct.unpack_from(order + _FORMATS[kind], exif, entry + 8)[0] if count else UPRIGHT
    except struct.error:  # cut off
        return None
    except KeyError:  # no integer
        return UPRIGHT
    return None
