"""What the first directory of a TIFF says of its picture (TIFF 6.0; BigTIFF; DNG 1.7, chapter 4).

Raw photos of cameras are TIFFs whose first picture is a thumbnail or a preview, often of a hundred
pixels. Pillow reads that one and says nothing.
"""

import re
import struct
from typing import Final

# Begins of files from cameras that are not TIFFs, though some look alike: Olympus, Panasonic,
# Fujifilm, Sigma, Minolta, Canon's CR3; and Canon's CR2, which is one.
_RAW: Final = re.compile(
    rb"IIR[OS]\x08\0|MMOR\0|IIU\0|FUJIFILMCCD-RAW|FOVb|\0MRM|.{4}ftypcrx |II\*\0.{4}CR[\x02-\x09]",
    re.DOTALL,
)

_NEW_SUBFILE_TYPE: Final = 254
_SUBFILE_TYPE: Final = 255
_PHOTOMETRIC: Final = 262
_CFA_PATTERN: Final = 33421
_DNG_VERSION: Final = 50706

_REDUCED: Final = 1
_OLD_REDUCED: Final = 2
_SENSOR: Final = (32803, 34892)  # colour filter array, linear raw

_FORMATS: Final = {1: "B", 3: "H", 4: "L", 13: "L", 16: "Q"}
_MOST_ENTRIES: Final = 4096


def is_raw(data: bytes | bytearray) -> bool:
    """Return whether a file is a raw photo by its first bytes, whatever its container."""
    return _RAW.match(data) is not None


def is_thumbnail(data: bytes | bytearray) -> bool:
    """Return whether the first picture of a TIFF is a reduced copy of another one, or the file a
    raw photo.

    A damaged directory is for the decoder to refuse.
    """
    try:
        tags = _first_directory(data)
    except (struct.error, ValueError):
        return False
    if _DNG_VERSION in tags or _CFA_PATTERN in tags or tags.get(_PHOTOMETRIC) in _SENSOR:
        return True
    return (
        bool(tags.get(_NEW_SUBFILE_TYPE, 0) & _REDUCED) or tags.get(_SUBFILE_TYPE) == _OLD_REDUCED
    )


def _first_directory(data: bytes | bytearray) -> dict[int, int]:
    """Return the first value of each tag in the first directory, for tags of integers that lie in
    their entry.
    """
    order = "<" if data[:2] == b"II" else ">"
    is_big = 43 in struct.unpack_from("<H", data, 2) + struct.unpack_from(">H", data, 2)
    offset, count_format, entry = (8, "Q", "HHQ8s") if is_big else (4, "H", "HHL4s")
    (start,) = struct.unpack_from(f"{order}{'Q' if is_big else 'L'}", data, offset)
    (count,) = struct.unpack_from(f"{order}{count_format}", data, start)
    if count > _MOST_ENTRIES:
        raise ValueError("too many entries")
    first = start + struct.calcsize(f"={count_format}")
    size = struct.calcsize(f"={entry}")
    tags: dict[int, int] = {}
    for place in range(first, first + count * size, size):
        tag, kind, _, value = struct.unpack_from(f"{order}{entry}", data, place)
        if kind in _FORMATS:
            (tags[tag],) = struct.unpack_from(f"{order}{_FORMATS[kind]}", value)
        else:
            tags.setdefault(tag, 0)
    return tags
