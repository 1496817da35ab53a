"""The first directory of a TIFF and its picture (TIFF 6.0; BigTIFF; DNG 1.7, chapter 4).

Cameras' raw photos are TIFFs whose first picture is a thumbnail or a preview, often of a hundred
pixels. Pillow reads that picture without a warning.
"""

import re
import struct
from typing import Final

# First bytes of cameras' raw files: Olympus, Panasonic, Fujifilm, Sigma, Minolta, Canon's CR3 and
# CR2. Only CR2 is a TIFF.
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
    """Return whether the first bytes of a file mark a raw photo, in any container."""
    return _RAW.match(data) is not None


def is_thumbnail(data: bytes | bytearray) -> bool:
    """Return whether a TIFF is a raw photo, or its first picture a reduced copy of another.

    Return False for a damaged directory, because the decoder refuses that.
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
    """Return the first value of each tag in the first directory.

    Integers are read from the entry itself. A tag of another type has the value 0.
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
    for position in range(first, first + count * size, size):
        tag, kind, _, value = struct.unpack_from(f"{order}{entry}", data, position)
        if kind in _FORMATS:
            (tags[tag],) = struct.unpack_from(f"{order}{_FORMATS[kind]}", value)
        else:
            tags.setdefault(tag, 0)
    return tags
