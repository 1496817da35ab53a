"""The orientation from Exif or XMP, and the TIFF directory that Exif shares, read without trusting either.

Only what is needed is read. A general Exif reader builds a table of every tag, and a few kilobytes of
overlapping tags can make such a table take hundreds of megabytes.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

UPRIGHT = 1
_ORIENTATION_TAG = 274
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_EXIF_PREFIX = b"Exif\0\0"
_MAX_ENTRIES = 65_535
"""What the 16-bit count of classic TIFF can say; BigTIFF's could say anything."""

_TYPE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""Bytes of one value by field type (TIFF 6.0, BigTIFF)."""

_UNSIGNED_FORMATS = {1: "B", 3: "H", 4: "L"}
"""Format characters of `struct` for the unsigned integer field types."""

Data = bytes | bytearray | memoryview


class Field(NamedTuple):
    """One entry of a directory.

    Attributes:
        entry: the entry itself: 12 bytes, or 20 in BigTIFF.
        tag: what the field states, such as 256 for the image's width.
    """

    entry: bytes
    tag: int
    field_type: int
    value_count: int

    @property
    def value_size(self) -> int:
        """Return the number of bytes of one value."""
        return _TYPE_SIZES.get(self.field_type, 1)

    @property
    def size(self) -> int:
        """Return the number of bytes of all values."""
        return self.value_size * self.value_count


class Directory(NamedTuple):
    """The first image file directory (IFD) of a TIFF file or an Exif block (TIFF 6.0, section 2).

    Attributes:
        byte_order: `<` or `>`, as `struct` names it.
        bigtiff: counts and offsets have 64 bits (BigTIFF).
        offset: byte at which the directory begins.
    """

    byte_order: str
    bigtiff: bool
    offset: int
    fields: tuple[Field, ...]

    def find(self, tag: int) -> Field | None:
        """Return the first field with this tag."""
        return next((field for field in self.fields if field.tag == tag), None)

    def inline(self, field: Field) -> bytes:
        """Return the last 4 (BigTIFF: 8) bytes of an entry: a short value, or the offset of a longer value."""
        return field.entry[12:] if self.bigtiff else field.entry[8:]

    def value_offset(self, field: Field) -> int | None:
        """Return the byte at which a field's value begins; None where the value stands in the entry."""
        inline = self.inline(field)
        if field.size <= len(inline):
            return None
        (offset,) = struct.unpack(self.byte_order + ("Q" if self.bigtiff else "L"), inline)
        return int(offset)

    def value(self, field: Field, data: Data) -> bytes:
        """Return a field's value, cut where the file ends."""
        offset = self.value_offset(field)
        return self.inline(field)[: field.size] if offset is None else bytes(data[offset : offset + field.size])


def read_directory(data: Data) -> Directory | None:
    """Return the first directory of a TIFF file or Exif block; None where there is none that can be read."""
    order = {b"II": "<", b"MM": ">"}.get(bytes(data[:2]))
    if order is None:
        return None
    try:
        (version,) = struct.unpack_from(order + "H", data, 2)
        bigtiff = version == 43
        (offset,) = struct.unpack_from(order + ("Q" if bigtiff else "L"), data, 8 if bigtiff else 4)
        (count,) = struct.unpack_from(order + ("Q" if bigtiff else "H"), data, offset)
    except (struct.error, OverflowError):
        return None
    first, size = (offset + 8, 20) if bigtiff else (offset + 2, 12)
    if count > min(_MAX_ENTRIES, (len(data) - first) // size):
        return None
    entries = (bytes(data[start : start + size]) for start in range(first, first + count * size, size))
    head = struct.Struct(order + ("HHQ" if bigtiff else "HHL"))
    return Directory(order, bigtiff, offset, tuple(Field(entry, *head.unpack_from(entry)) for entry in entries))


def directory_orientation(directory: Directory) -> int | None:
    """Return the value of the orientation tag; 1 where it is invalid, None where there is no such tag."""
    field = directory.find(_ORIENTATION_TAG)
    if field is None:
        return None
    code = _UNSIGNED_FORMATS.get(field.field_type)
    if code is None or field.value_count < 1:
        return UPRIGHT
    (value,) = struct.unpack_from(directory.byte_order + code, directory.inline(field))
    return _valid(int(value))


def read_orientation(exif: bytes | None, xmp: bytes | None = None) -> int:
    """Return the Exif orientation 1...8 (CIPA DC-008, tag 274); 1, upright, where none can be read.

    As in `PIL.ImageOps.exif_transpose`, XMP counts only where Exif, with or without its prefix, has no such tag.
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
