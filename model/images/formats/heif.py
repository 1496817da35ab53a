"""AVIF and HEIC, which share one container (ISO/IEC 23008-12); the brands in its first box tell them apart."""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import Self

from PIL import ImageFile, features
from PIL.AvifImagePlugin import AvifImageFile

from model.errors import InvalidImage, UnsupportedImageFormat
from model.images.exif import UPRIGHT
from model.images.formats.base import EncodedImage, bounded_parts

_FILE_TYPE_BOX = re.compile(rb".{4}ftyp", re.DOTALL)
_AVIF_BRANDS = {b"avif", b"avis"}
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}
_XMP_TYPE, _HIDDEN_TYPE = b"application/rdf+xml\0", b"application/ignored\0"


def _has_brand(data: bytes | bytearray, brands: set[bytes]) -> bool:
    """Return whether the first box names one of the brands."""
    end = min(int.from_bytes(data[:4], "big"), 256)
    return any(bytes(data[start : min(start + 4, end)]) in brands for start in range(8, end, 4))


class Avif(EncodedImage):
    """An AVIF file, whose orientation is read by libavif."""

    name = "AVIF"
    magic = _FILE_TYPE_BOX
    reader = AvifImageFile if features.check("avif") else None
    unsupported = "AVIF pictures are not supported: this Pillow is built without libavif"

    @classmethod
    def matches(cls, data: bytes | bytearray) -> bool:
        """Return whether the file is an ISO media file of an AVIF brand."""
        return super().matches(data) and _has_brand(data, _AVIF_BRANDS)

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Self:
        """Check that the boxes are whole; hide Exif."""
        _check_boxes(data)
        return cls(_without_exif(bytes(data)))

    def open(self) -> ImageFile.ImageFile:
        """Return Pillow's image with its header read and its pixels not yet decoded."""
        try:
            return super().open()
        except SyntaxError as error:
            # libavif's word for a file that is whole, but not as it expects: such as a required property left out.
            if "BMFF" in str(error):
                raise UnsupportedImageFormat("this AVIF picture is of a kind that libavif does not read") from error
            raise


class Heif(EncodedImage):
    """A HEIC file, which libheif turns upright."""

    name = "HEIF"
    magic = _FILE_TYPE_BOX
    reader = (
        importlib.import_module("pillow_heif").HeifImageFile
        if importlib.util.find_spec("pillow_heif") is not None
        else None
    )
    unsupported = "HEIC pictures are not supported: pip install -e '.[heic]' in the clone adds them"

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Self:
        """Refuse ISO media files that hold no picture, such as videos."""
        if not _has_brand(data, _HEIC_BRANDS):
            raise UnsupportedImageFormat("an ISO media file that is neither AVIF nor HEIC")
        return cls(bytes(data), orientation=UPRIGHT)


def _check_boxes(data: bytes | bytearray) -> None:
    """Refuse a file that its top boxes do not fill: libavif reports a cut file and an unreadable file alike."""
    position = 0
    for _ in bounded_parts():
        if position == len(data):
            return
        size = int.from_bytes(data[position : position + 4], "big")
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        if size == 0 and len(data) - position >= 8:  # to the end of the file
            return
        if size < 8 or position + size > len(data):
            raise InvalidImage("the AVIF file is cut off or its boxes are corrupt")
        position += size


def _without_exif(data: bytes) -> bytes:
    """Give Exif items a type that libavif does not know: Pillow would copy all that they claim to hold.

    Nothing is lost, since the orientation of an AVIF picture stands in its `irot` and `imir` properties. XMP, in
    which Pillow's users look for an orientation where there is no Exif, is hidden with it.
    """
    hidden: bytearray | None = None
    start = data.find(b"Exif")
    while start >= 0:
        # Item information entries of version 2 have an identifier of 16 bits, those of version 3 have 32 bits.
        if data[start - 12 : start - 7] == b"infe\2" or data[start - 14 : start - 9] == b"infe\3":
            hidden = hidden or bytearray(data.replace(_XMP_TYPE, _HIDDEN_TYPE))
            hidden[start : start + 4] = b"skip"
        start = data.find(b"Exif", start + 1)
    return data if hidden is None else bytes(hidden)
