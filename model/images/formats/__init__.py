"""Image formats: a class each, which recognises a file, takes it apart and names Pillow's reader for it.

The format is detected from the file's first bytes; the declared type is ignored. Of JPEG, PNG, GIF and TIFF the
decoder gets the first picture's data only, byte for byte. Metadata, thumbnails, comments, further pictures and
animation are left out once the orientation is read: Pillow spends time and memory on them, in Python and so under
the interpreter's lock, that a hostile file can drive up without bound and that a classifier has no use for.

To add a format, write a module with a subclass of `EncodedImage` and name that in `FORMATS`.
"""

from __future__ import annotations

from model.errors import InvalidImage, UnsupportedImageFormat
from model.images.formats.base import EncodedImage, MinSize
from model.images.formats.gif import Gif
from model.images.formats.heif import Avif, Heif
from model.images.formats.jpeg import Jpeg
from model.images.formats.png import Png
from model.images.formats.tiff import Tiff
from model.images.formats.whole_files import Bmp, WebP

__all__ = ["FORMATS", "SUPPORTED_FORMATS", "EncodedImage", "MinSize", "UnboundedWork", "unpack"]

FORMATS: tuple[type[EncodedImage], ...] = (Jpeg, Png, WebP, Gif, Tiff, Avif, Heif, Bmp)
"""The first that matches a file reads it; the most usual formats stand first."""

SUPPORTED_FORMATS: tuple[str, ...] = tuple(each.name for each in FORMATS if each.reader is not None)
"""Formats that this installation reads, as Pillow names them."""


class UnboundedWork(Exception):
    """The file's structure does not bound the work of decoding it."""


def unpack(data: bytes | bytearray, *, bounded: bool = False) -> EncodedImage:
    """Detect a whole file's format and leave out what its decoder need not see; keep no reference to a bytearray.

    Args:
        bounded: take only a file whose structure bounds the work of decoding it. Of formats that are never bounded,
            nothing but the magic is looked at.

    Raises:
        UnsupportedImageFormat: not the magic of an allowed format, or a format that this installation cannot read.
        InvalidImage: empty, cut off before the first picture begins, or made of absurdly many parts.
        UnboundedWork: `bounded`, and the file is not.
    """
    if not data:
        raise InvalidImage("the picture is empty: 0 bytes")
    kind = next((each for each in FORMATS if each.matches(data)), None)
    if kind is None:
        raise UnsupportedImageFormat("not a picture of an allowed format: JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF")
    if kind.reader is None:
        raise UnsupportedImageFormat(kind.unsupported)
    if bounded and not kind.may_be_bounded:
        raise UnboundedWork
    encoded = kind.parse(data)
    if bounded and not encoded.bounded:
        raise UnboundedWork
    return encoded
