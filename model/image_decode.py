"""Bytes to one decoded Pillow image: sniffed, bounded, complete."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from PIL import ExifTags, Image, UnidentifiedImageError, features

from model.errors import ImageTooLarge, InvalidImage, UnsupportedImageFormat

DEFAULT_MAX_PIXELS = 64_000_000

# Everything that Pillow's readers have been seen to raise on hostile bytes. Their code indexes, unpacks and
# divides numbers taken from the file, so a broken file surfaces as whatever that operation raises.
DECODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    Image.DecompressionBombError,
    ImportError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    RecursionError,
    struct.error,
    SyntaxError,
    TypeError,
    ValueError,
    Warning,
    zlib.error,
)

# Pillow can only be told once for the whole process; our own limit is checked for every picture instead, before
# its pixels are allocated, and may be higher or lower than Pillow's.
Image.MAX_IMAGE_PIXELS = None


@dataclass(frozen=True)
class Picture:
    """A decoded picture as it is stored, not yet upright.

    Attributes:
        image: loaded; any mode; 1/`scale` of the size below, rounded up.
        size: (width, height) in pixels of the whole picture as stored.
        scale: 1, 2, 4 or 8: what it was decoded at.
        orientation: Exif orientation, 1...8.
    """

    image: Image.Image
    size: tuple[int, int]
    scale: int
    orientation: int


def decode(
    data: bytes | bytearray | memoryview, *, max_pixels: int, smallest: Callable[[int, int], tuple[int, int]] | None
) -> Picture:
    """Decode the first picture in `data`."""
    fmt = sniff(data)
    try:
        image = Image.open(io.BytesIO(data), formats=[fmt])
        size = image.size
        if size[0] * size[1] > max_pixels:
            raise ImageTooLarge(f"the picture has {size[0]} x {size[1]} pixels, more than the {max_pixels} allowed")
        scale = 1
        if fmt == "JPEG":
            orientation = _orientation(image)
            if smallest is not None:
                wanted = smallest(*(size if orientation < 5 else size[::-1]))
                if image.draft(None, wanted if orientation < 5 else wanted[::-1]):
                    scale = image.decoderconfig[0]
            image.load()
        else:
            image.load()
            orientation = _orientation(image)
            size = image.size
    except UnidentifiedImageError as error:
        raise InvalidImage(f"the {fmt} picture does not decode") from error
    except DECODE_ERRORS as error:
        raise InvalidImage(f"the {fmt} picture does not decode: {error}") from error
    return Picture(image, size, scale, orientation)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except DECODE_ERRORS:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def sniff(data: bytes | bytearray | memoryview) -> str:
    head = bytes(data[:32])
    if not head:
        raise InvalidImage("the picture is empty: 0 bytes")
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head.startswith(b"BM"):
        return "BMP"
    if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "TIFF"
    if head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis", b"mif1", b"msf1") and features.check("avif"):
        return "AVIF"
    raise UnsupportedImageFormat("not a picture of an allowed format")
