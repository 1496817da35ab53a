"""TIFF (TIFF 6.0, BigTIFF)."""

from __future__ import annotations

import re
import struct
from typing import Self

import numpy as np
from PIL import ImageFile
from PIL.TiffImagePlugin import COMPRESSION, STRIPBYTECOUNTS, STRIPOFFSETS, TILEBYTECOUNTS, TILEOFFSETS, TiffImageFile

from model.errors import InvalidImage, UnsupportedImageFormat
from model.images.exif import Directory, Field, directory_orientation, read_directory, read_orientation
from model.images.formats.base import EncodedImage
from model.images.formats.jpeg import has_baseline_frame

_XMP, _JPEG = 700, 7
_PICTURE_TAGS = {
    *(256, 257, 258, 259, 262, 266, 273, 277, 278, 279, 284),  # size, samples, compression, strips
    *(292, 293, 317, 320, 322, 323, 324, 325, 332, 338, 339, 347),  # fax, predictor, colours, tiles, JPEG tables
    *(512, 513, 514, 515, 517, 518, 519, 520, 521, 529, 530, 531, 532),  # JPEG of old, YCbCr
}
_SINGLE_VALUE_TAGS = {256, 257, 259, 266, 277, 278, 284, 322, 323}
"""Tags whose second value Pillow leaves out with a warning."""

_INTEGER_TYPES = {3, 4, 16}
"""Field types of unsigned integers of 16, 32 and 64 bits."""

_MAX_VALUES = 65_536
"""Values of one field, such as the places of the strips."""


class _TiffReader(TiffImageFile):
    """Pillow's reader without its pixel limit, which belongs to the whole process; `decode` checks the size."""

    load_prepare = ImageFile.ImageFile.load_prepare


class Tiff(EncodedImage):
    """A TIFF file with a directory of the first picture's own fields."""

    name = "TIFF"
    magic = re.compile(rb"II[*+]\0|II\0\*|MM\0[*+]|MM\*\0")
    reader = _TiffReader

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Self:
        """Put a directory of the picture's own fields in the place of the first, which it fits.

        It is the last directory, so that metadata and other pictures cannot be reached from it.
        """
        directory = read_directory(data)
        if directory is None:
            raise InvalidImage("the TIFF file's first directory cannot be read")
        fields = {field.tag: field for field in reversed(directory.fields) if field.tag in _PICTURE_TAGS}
        if sum(field.size for field in fields.values()) > len(data):
            raise InvalidImage("the TIFF file's directory claims more data than the file has")
        if any(
            sum(_integers(fields.get(tag), directory, data)) > len(data) for tag in (STRIPBYTECOUNTS, TILEBYTECOUNTS)
        ):
            # Strips that share their bytes would be unpacked again and again.
            raise InvalidImage("the TIFF file's strips or tiles claim more data than the file has")
        if any(field.value_size > 1 and field.value_count > _MAX_VALUES for field in fields.values()):
            raise InvalidImage(f"the TIFF file has more than {_MAX_VALUES} strips, tiles or colours")
        orientation = directory_orientation(directory)
        if orientation is None:
            xmp = directory.find(_XMP)
            orientation = read_orientation(None, directory.value(xmp, data) if xmp else None)

        _check_jpeg(fields, directory, data)
        # Pillow ignores fields whose values stand outside the file, and warns of them.
        entries = [
            _entry(field, directory, data)
            for _, field in sorted(fields.items())
            if (directory.value_offset(field) or 0) + field.size <= len(data)
        ]
        count = struct.pack(directory.byte_order + ("Q" if directory.bigtiff else "H"), len(entries))
        no_next = bytes(8 if directory.bigtiff else 4)
        rewritten = b"".join((count, *entries, no_next))
        view = memoryview(data)
        end = directory.offset + len(rewritten)
        return cls(b"".join((view[: directory.offset], rewritten, view[end:])), orientation=orientation)


def _check_jpeg(fields: dict[int, Field], directory: Directory, data: bytes | bytearray) -> None:
    """Raise `UnsupportedImageFormat` if a strip or tile is a JPEG that is not sequential with Huffman codes."""
    if _integers(fields.get(COMPRESSION), directory, data)[:1] != [_JPEG]:
        return
    for tag in (STRIPOFFSETS, TILEOFFSETS):
        if not all(has_baseline_frame(data, at) for at in _integers(fields.get(tag), directory, data)):
            raise UnsupportedImageFormat("of TIFF files with JPEG inside, only those with baseline JPEG are read")


def _entry(field: Field, directory: Directory, data: bytes | bytearray) -> bytes:
    """Return the entry of a field in the directory, with its first value alone."""
    if field.tag not in _SINGLE_VALUE_TAGS or field.value_count < 2:
        return field.entry
    value, inline = directory.value(field, data)[: field.value_size], directory.inline(field)
    # A value that is too long for the entry stays where it is.
    short = value if len(value) <= len(inline) else inline
    form = directory.byte_order + ("HHQ8s" if directory.bigtiff else "HHL4s")
    return struct.pack(form, field.tag, field.field_type, 1, short)


def _integers(field: Field | None, directory: Directory, data: bytes | bytearray) -> list[int]:
    """Return a field's integers; none where there is no such field or it holds no integers."""
    if field is None or field.field_type not in _INTEGER_TYPES:
        return []
    values = np.frombuffer(directory.value(field, data), np.uint8)
    whole = values[: len(values) // field.value_size * field.value_size]
    return list(map(int, whole.view(f"{directory.byte_order}u{field.value_size}")))
