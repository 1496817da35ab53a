"""Decoding of bytes to one Pillow image, to the end of the file, with bounds on pixels and memory.

    bytes -> unpacked (what the decoder has to see) -> opened, checked -> decoded

The reader of the detected format is called by itself: `PIL.Image.open` would try others too. Pillow's own pixel
limit is left alone: it is one for the whole process, too late for some formats and too low for an operator who allows
more. Ours is checked for every picture, before its pixels are allocated.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from PIL import Image

from model.errors import ImageTooLarge, InvalidImage, UnsupportedImageFormat
from model.images.control import UNCONTROLLED, WorkControl
from model.images.exif import read_orientation
from model.images.formats import EncodedImage, MinSize, unpack

DEFAULT_MAX_PIXELS = 64_000_000

# What Pillow's readers and the libraries below them raise on broken bytes. They index, unpack and divide numbers
# taken from the file, so that a broken file surfaces as whatever that operation raises; RuntimeError is
# libavif's and libheif's general error, ImportError a Pillow built without the codec that a file asks for.
DECODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    Warning,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)

MAX_SIDE = 1_048_576
"""Pixels of one side. A resize holds filter weights for every pixel of a side, 48 bytes of them at most."""

_BYTES_PER_ALLOWED_PIXEL = 6.5
"""What decoding may allocate at its peak, in bytes for each pixel that is allowed: 416 MB for 64 million."""

_MAX_SCANS = 1_000
_MAX_SCAN_PASSES = 20
"""Times that a progressive JPEG of the largest allowed size may be gone over; smaller ones more often. Encoders
write about 10 scans."""


class DecodedImage(NamedTuple):
    """A decoded picture as it is stored, perhaps not upright.

    Attributes:
        image: loaded, any mode, at 1/`scale` of `size`, rounded up.
        size: (width, height) of the whole picture as stored, in pixels.
        scale: 1, 2, 4 or 8.
        orientation: Exif orientation, 1...8.
    """

    image: Image.Image
    size: tuple[int, int]
    scale: int
    orientation: int


def decode(
    data: bytes | bytearray,
    *,
    max_pixels: int,
    min_size: MinSize | None = None,
    control: WorkControl = UNCONTROLLED,
) -> DecodedImage:
    """Return the first picture in a file, all of it decoded. Thread-safe.

    Args:
        data: the whole file.
        max_pixels: how many pixels the picture may have. WebP is bounded by twice `PIL.Image.MAX_IMAGE_PIXELS`, too.
        min_size: the smallest size that a large JPEG may be decoded at; None decodes at full size.
        control: is told what decoding will cost, and may end it: at any time in JPEG, PNG, GIF and BMP, before the
            codec's only call in the others. What it raises is raised here.

    Raises:
        UnsupportedImageFormat: not the magic of an allowed format, or one that this installation cannot read.
        ImageTooLarge: too many pixels, or too much memory to decode them; raised before they are allocated.
        InvalidImage: empty, truncated or corrupt.
    """
    encoded = unpack(data)
    if encoded.reader is None:
        raise UnsupportedImageFormat(encoded.unsupported)
    try:
        if encoded.size is not None:
            _check_pixels(encoded.size, max_pixels)
            _check_memory(encoded.name, encoded.size, encoded.opening_bytes, max_pixels)
        image = encoded.open(control)
        size = image.size
        _check_pixels(size, max_pixels)
        _check_scans(encoded, size, max_pixels)
        scale = encoded.draft(image, min_size) if min_size is not None else 1
        _check_memory(encoded.name, size, encoded.decoding_bytes(image, scale), max_pixels)
        cost = encoded.cost(image, scale)
        if size[0] * size[1] * cost > max_pixels * encoded.max_cost:
            raise ImageTooLarge(f"this {encoded.name} picture of {size[0]} x {size[1]} pixels takes too long to decode")
        control.estimated(size[0] * size[1] * cost)
        control.check()
        image.load()
        orientation = encoded.orientation
        if orientation is None:
            orientation = read_orientation(image.info.get("exif"), image.info.get("xmp"))
    except Image.DecompressionBombError as error:
        raise ImageTooLarge(f"the {encoded.name} picture is larger than Pillow decodes: {error}") from error
    except DECODE_ERRORS as error:
        raise InvalidImage(f"the {encoded.name} picture does not decode: {_reason(error)}") from error
    return DecodedImage(image, size, scale, orientation)


def _check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ImageTooLarge(f"the picture has {width} x {height} pixels: at most {max_pixels} are allowed")
    if max(width, height) > MAX_SIDE:
        raise ImageTooLarge(f"the picture has {width} x {height} pixels: a side may have at most {MAX_SIDE}")


def _check_memory(name: str, size: tuple[int, int], bytes_per_pixel: float, max_pixels: int) -> None:
    need, allowed = size[0] * size[1] * bytes_per_pixel, max_pixels * _BYTES_PER_ALLOWED_PIXEL
    if need > allowed:
        raise ImageTooLarge(
            f"decoding this {name} picture of {size[0]} x {size[1]} pixels takes {need / 1e6:.0f} MB: "
            f"at most {allowed / 1e6:.0f} are allowed"
        )


def _check_scans(encoded: EncodedImage, size: tuple[int, int], max_pixels: int) -> None:
    passes = encoded.scans * size[0] * size[1] / max_pixels
    if encoded.scans > _MAX_SCANS or passes > _MAX_SCAN_PASSES:
        raise InvalidImage(f"the JPEG picture is stored in {encoded.scans} scans, more than are read")


def _reason(error: BaseException) -> str:
    """Return the reader's message, in one line for the sender; not that of an accident inside it."""
    text = error.args[0] if error.args else None
    if isinstance(error, OSError | RuntimeError | SyntaxError | ValueError) and isinstance(text, str):
        return " ".join(text.split())[:160]
    return "it is truncated or corrupt"
