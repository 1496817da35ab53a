"""Which way up: the orientation from Exif or XMP, read without trusting either.

Only what is needed is read. A general Exif reader builds a table of every tag, and a few kilobytes of
overlapping tags can make such a table take hundreds of megabytes.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import NamedTuple

UPRIGHT = 1
_ORIENTATION_TAG = 274
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_EXIF_PREFIX = b"Exif\0\0"
_MAX_ENTRIES = 65_535
"""What the 16-bit count of classic TIFF can say; BigTIFF's could say anything."""

_TYPE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""Bytes of one value by field type (TIFF 6.0, BigTIFF)."""

_INTEGER_CODES = {1: "B", 3: "H", 4: "L"}
"""How `struct` reads the unsigned integer field types."""


class Field(NamedTuple):
    """One entry of a directory.

    Attributes:
        tag: what it says.
        kind: field type, a key of `_TYPE_SIZES`.
        number: how many values.
        entry: the entry itself: 12 bytes, or 20 in BigTIFF.
    """

    tag: int
    kind: int
    number: int
    entry: bytes

    @property
    def value_size(self) -> int:
        """Bytes of one value."""
        return _TYPE_SIZES.get(self.kind, 1)


@dataclass(frozen=True)
class Directory:
    """The first image file directory of a TIFF structure (TIFF 6.0, section 2), as Exif has one too.

    Attributes:
        order: `<` or `>`: the byte order as `struct` names it.
        big: 64-bit counts and offsets (BigTIFF).
        offset: where it begins.
        fields: in the file's order.
    """

    order: str
    big: bool
    offset: int
    fields: tuple[Field, ...]

    def find(self, tag: int) -> Field | None:
        """The first field with this tag."""
        return next((field for field in self.fields if field.tag == tag), None)

    def inline(self, field: Field) -> bytes:
        """The last 4 (BigTIFF: 8) bytes of an entry: a short value, or where the value stands."""
        return field.entry[12:] if self.big else field.entry[8:]

    def value(self, field: Field, data: bytes) -> bytes:
        """A field's value as bytes, cut where the file ends."""
        size = field.value_size * field.number
        inline = self.inline(field)
        if size <= len(inline):
            return inline[:size]
        (offset,) = struct.unpack(self.order + ("Q" if self.big else "L"), inline)
        return data[offset : offset + size]


def read_directory(data: bytes | memoryview) -> Directory | None:
    """The first directory of a TIFF file or Exif block; None where there is none that can be read."""
    order = {b"II": "<", b"MM": ">"}.get(bytes(data[:2]))
    if order is None:
        return None
    try:
        (version,) = struct.unpack_from(order + "H", data, 2)
        big = version == 43
        (offset,) = struct.unpack_from(order + ("Q" if big else "L"), data, 8 if big else 4)
        (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, offset)
        entry, first = struct.Struct(order + ("HHQ8s" if big else "HHL4s")), offset + (8 if big else 2)
        if count > min(_MAX_ENTRIES, (len(data) - first) // entry.size):
            return None
        table = bytes(data[first : first + count * entry.size])
    except (struct.error, OverflowError):
        return None
    return Directory(
        order,
        big,
        offset,
        tuple(
            Field(tag, kind, number, table[start : start + entry.size])
            for start, (tag, kind, number, _) in zip(
                range(0, len(table), entry.size), entry.iter_unpack(table), strict=True
            )
        ),
    )


def directory_orientation(directory: Directory) -> int | None:
    """What the orientation tag says; 1 where it says nonsense, None where there is no such tag."""
    field = directory.find(_ORIENTATION_TAG)
    if field is None:
        return None
    code = _INTEGER_CODES.get(field.kind)
    if code is None or field.number < 1:
        return UPRIGHT
    (value,) = struct.unpack_from(directory.order + code, directory.inline(field))
    return _valid(int(value))


def orientation(exif: bytes | None, xmp: bytes | None = None) -> int:
    """Exif orientation 1...8 (CIPA DC-008, tag 274); 1, upright, where none is stated or none can be read.

    As in `PIL.ImageOps.exif_transpose`, XMP counts only where Exif has no such tag.

    Args:
        exif: an Exif block, with or without its prefix.
        xmp: an XMP packet.
    """
    if exif:
        # Some writers state the prefix twice.
        directory = read_directory(exif.removeprefix(_EXIF_PREFIX).removeprefix(_EXIF_PREFIX))
        stated = directory_orientation(directory) if directory else None
        if stated is not None:
            return stated
    match = _XMP_ORIENTATION.search(xmp) if xmp else None
    return _valid(int(match[1])) if match else UPRIGHT


def _valid(value: int) -> int:
    return value if 1 <= value <= 8 else UPRIGHT
