"""Bytes to one decoded Pillow image: format sniffed, pixels and memory bounded, decoded to the end.

    bytes -> container (what the decoder has to see) -> opened, checked -> decoded

The reader of the one format that the magic names is called by itself: `PIL.Image.open` would try others too.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageFile, features
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, ROWSPERSTRIP, TILELENGTH, TILEWIDTH, TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from model.errors import ImageTooLarge, InvalidImage, UnsupportedImageFormat
from model.images.container import Container, Format, unpack, without_detail
from model.images.exif import UPRIGHT
from model.images.exif import orientation as read_orientation

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

_WEBP_BYTES = 12.0
"""Bytes per pixel that libwebp holds beside the picture: two canvases and a frame of 32 bits."""

_PIXEL_BYTES = {"1": 1, "L": 1, "P": 1}
"""Bytes of a pixel in Pillow's memory; I;16 has 2, all others 4, RGB too."""

_MAX_SCANS = 1_000
_MAX_SCAN_PASSES = 20
"""Times that a progressive JPEG of the largest allowed size may be gone over; smaller ones more often. Encoders
write about 10 scans."""

# Pillow's own limit can only be set for a whole process and is too late for some formats and too low for an
# operator who allows more. Ours is checked for every picture, before its pixels are allocated.
Image.MAX_IMAGE_PIXELS = None

# Pillow logs each chunk that it reads and what it finds odd. Here a file decodes or raises, and that says it all.
logging.getLogger("PIL").setLevel(logging.CRITICAL)
# The one place left where it would also warn: about TIFF fields, and the Exif block of an AVIF file.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.TiffImagePlugin")

_READERS: dict[Format, Callable[[io.BytesIO], ImageFile.ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}
"""What this installation can read."""

if features.check("webp"):
    _READERS["WEBP"] = WebPImageFile
if features.check("avif"):
    _READERS["AVIF"] = AvifImageFile
if importlib.util.find_spec("pillow_heif") is not None:
    _READERS["HEIF"] = importlib.import_module("pillow_heif").HeifImageFile

SUPPORTED_FORMATS: tuple[Format, ...] = tuple(_READERS)
"""Formats that `decode` reads here, as Pillow names them."""

_NOT_SUPPORTED = {
    "WEBP": "WebP pictures are not supported: this Pillow is built without libwebp",
    "AVIF": "AVIF pictures are not supported: this Pillow is built without libavif",
    "HEIF": "HEIC pictures are not supported: pip install 'vitserve[heic]' adds them",
}


@dataclass(frozen=True)
class Picture:
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
    data: bytes | bytearray, *, max_pixels: int, smallest: Callable[[int, int], tuple[int, int]] | None = None
) -> Picture:
    """Decode the first picture in a file, all of it.

    Args:
        data: the whole file.
        max_pixels: how many pixels the picture may have.
        smallest: of an upright (width, height) in pixels, the smallest size that it may be decoded at, which a
            large JPEG makes use of. None: decode at full size.

    Raises:
        UnsupportedImageFormat: not the magic of an allowed format, or one that this installation cannot read.
        ImageTooLarge: too many pixels, or too much memory to decode them; raised before they are allocated.
        InvalidImage: empty, truncated or corrupt.
    """
    container = unpack(data)
    name = container.format
    if name not in _READERS:
        raise UnsupportedImageFormat(_NOT_SUPPORTED[name])
    try:
        if container.size is not None:
            _check_pixels(container.size, max_pixels)
            _check_memory(name, container.size, _WEBP_BYTES if name == "WEBP" else 1.0, max_pixels)
        image = _open(container)
        size = image.size
        _check_pixels(size, max_pixels)
        _check_scans(container, size, max_pixels)
        orientation = container.orientation
        scale = 1
        if container.scalable and smallest is not None:
            scale = _draft(image, smallest, orientation or UPRIGHT)
        _check_memory(name, size, _decoding_bytes(container, image, scale), max_pixels)
        shorter = without_detail(container, scale, _not_subsampled(image)) if scale > 1 else None
        if shorter is not None:
            image.fp = io.BytesIO(shorter)
        image.load()
        if orientation is None:
            orientation = read_orientation(image.info.get("exif"), image.info.get("xmp"))
    except DECODE_ERRORS as error:
        raise InvalidImage(f"the {name} picture does not decode: {_reason(error)}") from error
    return Picture(image, size, scale, orientation)


def _open(container: Container) -> ImageFile.ImageFile:
    """Read the header."""
    try:
        image = _READERS[container.format](io.BytesIO(container.data))
    except SyntaxError as error:
        # libavif's word for a file that is whole, but not as it expects: such as a required property left out.
        if container.format == "AVIF" and "BMFF" in str(error):
            raise UnsupportedImageFormat("this AVIF picture is of a kind that libavif does not read") from error
        raise
    if container.format == "JPEG":
        # The whole file at once: no copies, and the interpreter's lock is let go of once, not for every 64 KiB.
        image.decodermaxblock = len(container.data)
    return image


def _draft(image: Image.Image, smallest: Callable[[int, int], tuple[int, int]], orientation: int) -> int:
    """Tell the JPEG decoder to scale down as far as `smallest` allows; 1, 2, 4 or 8 times."""
    width, height = image.size
    wanted = smallest(height, width)[::-1] if orientation >= 5 else smallest(width, height)
    for scale in (8, 4, 2):
        if width >= scale * wanted[0] and height >= scale * wanted[1]:
            # Pillow takes the largest scale that leaves at least this size: the one that was just found.
            image.draft(None, (width // scale, height // scale))
            return scale
    return 1


def _not_subsampled(jpeg: ImageFile.ImageFile) -> set[int]:
    """Identifiers of the components that have as many samples as the most finely sampled one."""
    assert isinstance(jpeg, JpegImageFile)
    factors = {(columns, rows) for _, columns, rows, _ in jpeg.layer}
    finest = max(columns for columns, _ in factors), max(rows for _, rows in factors)
    coarse = {name for name, columns, rows, _ in jpeg.layer if (columns, rows) != finest}
    return {name for name, *_ in jpeg.layer} - coarse


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


def _check_scans(container: Container, size: tuple[int, int], max_pixels: int) -> None:
    passes = container.scans * size[0] * size[1] / max_pixels
    if container.scans > _MAX_SCANS or passes > _MAX_SCAN_PASSES:
        raise InvalidImage(f"the JPEG picture is stored in {container.scans} scans, more than are read")


def _decoding_bytes(container: Container, image: ImageFile.ImageFile, scale: int) -> float:
    """Bytes that decoding holds at its peak, for each pixel of the stored picture."""
    pixel = 2 if image.mode.startswith("I;16") else _PIXEL_BYTES.get(image.mode, 4)
    if isinstance(image, JpegImageFile):
        coefficients = 0.0
        if container.buffered:
            # 16 bits each; a component has as many as its share of the most finely sampled one.
            factors = [(rows, columns) for _, rows, columns, _ in image.layer]
            full = max(rows for rows, _ in factors) * max(columns for _, columns in factors)
            coefficients = 2.0 * sum(rows * columns for rows, columns in factors) / full
        return pixel / scale**2 + coefficients
    if isinstance(image, TiffImageFile) and image.info.get("compression") != "raw":
        return pixel + _tiff_block_bytes(image) / (image.width * image.height)
    if isinstance(image, WebPImageFile):
        return pixel + _WEBP_BYTES
    if isinstance(image, AvifImageFile):
        # Planes of up to 16 bits at full chroma (measured: 10.8 bytes in all for 8 bits, RGB; 13.2 with alpha).
        return pixel + (14.0 if image.mode == "RGBA" else 10.0)
    if container.format == "HEIF":
        # 8 bits: the frame in RGB(A); more: planes and frame of 16 bits.
        return pixel + (4.0 if image.info.get("bit_depth", 8) == 8 else 14.0)
    return float(pixel)


def _tiff_block_bytes(image: TiffImageFile) -> float:
    """Bytes of the largest strip or tile, which libtiff holds unpacked."""
    tags = image.tag_v2
    width, rows = tags.get(TILEWIDTH), tags.get(TILELENGTH)
    if width is None or rows is None:
        width, rows = image.width, min(image.height, tags.get(ROWSPERSTRIP, image.height))
    if not isinstance(width, int) or not isinstance(rows, int):
        raise InvalidImage("the TIFF picture's tiles have no valid size")
    # Pixels are unpacked to at least 32 bits where libtiff converts colours.
    sample_bits = tags.get(BITSPERSAMPLE, (8,))
    bits = sum(sample_bits) if isinstance(sample_bits, tuple) else sample_bits
    return width * rows * max(bits / 8, 4.0 if image.mode == "RGB" else 0.0)


def _reason(error: BaseException) -> str:
    """What the reader says, in one line for the sender of the picture; not what merely tripped inside it."""
    text = error.args[0] if error.args else None
    if isinstance(error, OSError | RuntimeError | SyntaxError | ValueError) and isinstance(text, str):
        return " ".join(text.split())[:160]
    return "it is truncated or corrupt"
