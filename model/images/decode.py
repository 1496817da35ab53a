"""Decode a whole file to one Pillow image, with bounds on pixels and memory.

    bytes -> format -> stripped of metadata -> opened, checked -> decoded -> RGB or grey, in pieces

Pillow's reader of the recognised format is called directly, because `PIL.Image.open` would try
other readers too. The header of a JPEG or PNG may bound the work (`is_bounded`); such a file may be
decoded in a thread. For any other file, only the limits of the process that decodes it bound the
cost (`model.images.decoder_process`).

The decoder gets only the first picture's data of a JPEG or PNG. Metadata, thumbnails and comments
are removed after the orientation is read. Pillow parses them in Python under the interpreter's
lock, and a hostile file could make that take any amount of time and memory.

Pillow's own pixel limit stays unchanged because it is global to the process. Our limit is checked
for every picture before its pixels are allocated.
"""

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from model.errors import (
    SMALLER_PICTURE,
    ImageTooCostly,
    ImageTooLarge,
    InvalidImage,
    UnsupportedImageFormat,
)
from model.images import formats, png
from model.images.failure import is_truncated, reason
from model.images.formats import UPRIGHT, read_orientation
from model.images.gif import canvas_size
from model.images.tiff import OTHER_SAMPLES, bits_of_16, check_samples

# Bytes that a decoder reads at a time: most files in one piece.
_PIECE_BYTES = 262_144

DEFAULT_MAX_PIXELS = 64_000_000

# Exceptions of Pillow's readers, and of the libraries below them, on broken bytes. The readers
# index, unpack and divide numbers from the file, so the exception type depends on the operation.
# RuntimeError is the general error of libavif and libheif. ImportError means a Pillow without the
# codec of the file.
DECODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
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

# Most pixels along one side. A resize holds filter weights for every pixel of a side, up to 48
# bytes each.
MAX_SIDE = 1_048_576

# Maps an upright (width, height) in pixels to the smallest (width, height) to decode it at.
MinSize = Callable[[int, int], tuple[int, int]]

# Converts a piece of one picture.
Converter = Callable[[Image.Image], Image.Image]

# The decoder reads bits ahead, which may hold several rows of a flat picture. No code has ones only
# (ITU-T T.81, annex C), so that these 9 bytes of ones fill at most three blocks.
_PADDING: Final = b"\xff\0" * 9
# Marks in the last row: a picture hardly has all of their values.
_MARKS: Final = 4

_NOT_FINITE: Final = "some pixels are not finite"
# Except in the smallest range, a pixel must reach one part in this many of the range.
_LEAST_SHARE: Final = 8
_COLOURS = ("RGB", "RGBA", "RGBX", "CMYK")
_GREY = ("1", "L", "LA", "La")
# Modes that Pillow converts to grey or RGB only through other modes.
_ROUTES: dict[str, tuple[str, ...]] = {"La": ("LA",), "LAB": ("RGB",)}


class DecodedImage(NamedTuple):
    """A decoded picture in its stored orientation, perhaps not upright.

    Attributes:
        image: loaded, any mode, at 1/`scale` of `size`, rounded up.
        size: (width, height) of the whole stored picture, in pixels.
        scale: 1, 2, 4 or 8.
        orientation: orientation in Exif or XMP, 1...8.
    """

    image: Image.Image
    size: tuple[int, int]
    scale: int
    orientation: int


def is_bounded(data: bytes | bytearray) -> bool:
    """Return whether the header bounds the decoding of a file to 0.5 s and 180 MB.

    This function looks at a few hundred bytes of the file.
    """
    match = formats.MAGIC.match(data)
    if match is None:  # `decode` refuses it at once
        return True
    if match.lastgroup == "JPEG":
        return formats.is_bounded_jpeg(data)
    return match.lastgroup == "PNG" and png.is_bounded(data)


def decode(
    data: bytes | bytearray, *, max_pixels: int, min_size: MinSize | None = None
) -> DecodedImage:
    """Return the first picture in a file, completely decoded. Thread-safe.

    Time and memory are bounded for bounded files (`is_bounded`). For other files, only the limits
    of the process bound them (`model.images.decoder_process`).

    Args:
        data: the whole file.
        max_pixels: most pixels of the picture. For WebP, GIF and TIFF, Pillow also refuses more
            than twice `PIL.Image.MAX_IMAGE_PIXELS`.
        min_size: smallest size to decode a large JPEG at; None decodes at full size.

    Raises:
        UnsupportedImageFormat: an unknown format, or a format that this installation cannot read.
        ImageTooLarge: too many pixels; raised before they are allocated.
        ImageTooCostly: decoding takes more memory than is available.
        InvalidImage: empty, truncated or corrupt.
    """
    name = formats.format_of(data)
    if name == "GIF":
        _check_pixels(canvas_size(data), max_pixels)
    try:
        image, orientation = _open_image(name, data)
        size = image.size
        _check_pixels(size, max_pixels)
        scale = 1
        if min_size is not None and name == "JPEG":
            scale = _draft(image, min_size, swapped=(orientation or UPRIGHT) >= 5)
        if isinstance(image.fp, _JpegFile):
            image.fp.watch(image, size, scale)
        image.load()
        if scale == 1:  # Pillow turns a TIFF upright during the load
            size = image.size
        if orientation is None:
            orientation = read_orientation(image.info.get("exif"), image.info.get("xmp"))
    except Image.DecompressionBombError as error:
        raise ImageTooLarge(f"the {name} picture is larger than Pillow decodes: {error}") from error
    except MemoryError as error:
        raise ImageTooCostly(
            f"decoding this {name} picture takes more memory than is allowed: {SMALLER_PICTURE}; "
            "a higher VIT_MAX_IMAGE_PIXELS allows more"
        ) from error
    except DECODE_ERRORS as error:
        raise InvalidImage(
            f"the {name} picture does not decode: {reason(name, data, error)}"
        ) from error
    return DecodedImage(image, size, scale, orientation)


def _open_image(name: str, data: bytes | bytearray) -> tuple[ImageFile.ImageFile, int | None]:
    """Return Pillow's image with only its header read, and its orientation.

    Args:
        name: result of `formats.format_of`.
        data: the whole file; no reference to a bytearray is kept.

    Returns:
        The image, and its orientation 1...8, or None if only the reader can tell.

    Raises:
        UnsupportedImageFormat: a kind of AVIF or JPEG that is not supported.
        InvalidImage: truncated before the first picture begins, or made of too many parts.
        Exception: see `DECODE_ERRORS`.
    """
    # Pillow and libheif turn TIFF and HEIC upright; GIF and BMP have no orientation.
    orientation = None if name in ("WEBP", "AVIF") else UPRIGHT
    file: io.BytesIO | None = None
    if name == "JPEG":
        data, orientation, scan = formats.strip_jpeg(data)
        if formats.size_of_one_scan(data) is not None:
            file = _JpegFile(data, scan)
    elif name == "PNG":
        data, orientation = png.strip(data)
    reader = formats.READERS[name]
    assert reader is not None, "format_of refuses a format without a reader"
    try:
        image = reader(file or io.BytesIO(data))
    except SyntaxError as error:
        # libavif raises this for a truncated file and for a file that lacks a required property.
        if "BMFF" in str(error) and not is_truncated(name, data):
            raise UnsupportedImageFormat(
                "this AVIF picture is of a kind that libavif does not read"
            ) from error
        if str(error) == "unknown pixel mode":
            raise UnsupportedImageFormat(OTHER_SAMPLES) from error
        raise
    if isinstance(image, TiffImageFile):
        check_samples(image)
    image.decodermaxblock = _PIECE_BYTES
    return image, orientation


class _JpegFile(io.BytesIO):
    """A JPEG with one scan, whose end marker is read only if the pixels before it are there.

    libjpeg fills missing pixels when it reads the end marker, and Pillow does not tell. Without
    that marker, it decodes no row that lacks more than three blocks.

    Args:
        data: the file.
        scan: position of the scan, in which 0xFF 0xD9 is the end marker.
    """

    def __init__(self, data: bytes, scan: int) -> None:
        values = np.frombuffer(data, np.uint8)
        markers = scan + np.flatnonzero(values[scan:-1] == 0xFF)  # faster than `find`
        ends = markers[values[markers + 1] == 0xD9]
        end = int(ends[0]) if len(ends) else len(data)
        super().__init__(data[:end])
        self._rest = data[end:]
        self._is_padded = False
        self._marks: list[Any] = []
        self._read_marks: Callable[[], list[Any]] = list

    def watch(self, image: Image.Image, size: tuple[int, int], scale: int) -> None:
        """Mark pixels in the last row of blocks; no effect in a small picture.

        The place does not depend on the scale, so a file is refused at any scale or at none.

        Args:
            image: Pillow's image of this file, before its load.
            size: (width, height) without the scale.
            scale: the decoder's scale.
        """
        assert isinstance(image, JpegImageFile)
        image.load_prepare()
        pixels = image.im  # the image itself holds this file
        width, height = size
        if width < 16 * _MARKS:
            return
        block = 8 * max(sampling for _, _, sampling, _ in image.layer)
        row = (height - 1) // block * block // scale
        places = [(number * image.width // _MARKS, row) for number in range(_MARKS)]
        bands = len(image.getbands())
        for number, place in enumerate(places):
            mark = tuple((37 * number + 91 * band) % 255 for band in range(bands))
            pixels.putpixel(place, mark if bands > 1 else mark[0])
        self._read_marks = lambda: [pixels.getpixel(place) for place in places]
        self._marks = self._read_marks()

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes; raises `OSError` before the end marker if pixels are missing."""
        part = super().read(size)
        if part or not self._rest:
            return part
        if self._marks and self._marks == self._read_marks():
            if self._is_padded:
                raise OSError("bytes are missing within the file: send the whole file")
            self._is_padded = True
            return _PADDING
        rest = self._rest
        self._rest = b""
        return rest


def _draft(image: Image.Image, min_size: MinSize, *, swapped: bool) -> int:
    """Set the JPEG decoder's scale, and return it: 8, 4 or 2 if `min_size` allows, else 1."""
    width, height = image.size
    if swapped:
        min_height, min_width = min_size(height, width)
    else:
        min_width, min_height = min_size(width, height)
    for scale in (8, 4, 2):
        if width >= scale * min_width and height >= scale * min_height:
            # Pillow takes the largest scale that leaves at least this size: the scale of this
            # loop.
            image.draft(None, (width // scale, height // scale))
            return scale
    return 1


def _check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ImageTooLarge(
            f"the picture has {width} x {height} pixels: at most {max_pixels} are allowed "
            "(VIT_MAX_IMAGE_PIXELS)"
        )
    if max(width, height) > MAX_SIDE:
        raise ImageTooLarge(
            f"the picture has {width} x {height} pixels: a side may have at most {MAX_SIDE}"
        )


# Colours


def converter(image: Image.Image, mode: Literal["RGB", "L"]) -> Converter | None:
    """Return the function that converts any piece of `image` like `convert(mode)` on the whole.

    Return None if the image needs no conversion. Alpha is dropped, not blended, and ICC profiles
    are ignored. As in browsers, every CMYK JPEG counts as inverted, with Adobe's marker or without.
    Two kinds of modes are scaled, because Pillow would clip them:

    * 16-bit grey (I;16, I;16B, I;16L, I;16N) is scaled to its highest eight bits, like Pillow's
      16-bit colour.
    * TIFF does not state the range of 32-bit integers and floats (I, F): see `_range_limits`.

    Args:
        image: loaded. The transparent colour is removed from its `info`, because it only costs time
            here.
        mode: RGB or L. A grey picture stays L under RGB too: its three channels would be equal, and
            one channel is resized in a third of the time.
    """
    image.info.pop("transparency", None)
    stored = image.mode
    if stored in (mode, "L"):
        return None
    if stored.startswith("I;16"):
        # Pillow passes 16-bit pixels on in the machine's byte order, or names the order in the
        # dtype.
        shift = bits_of_16(image) - 8
        return lambda piece: Image.fromarray(
            np.minimum(np.asarray(piece) >> shift, 255).astype(np.uint8)
        )
    if stored in ("I", "F"):
        return _scaler(image)
    route = _ROUTES.get(stored, ()) + (("L",) if stored in _GREY else (mode,))

    def convert(piece: Image.Image) -> Image.Image:
        for step in route:
            piece = piece.convert(step)
        return piece

    return convert


def _scaler(image: Image.Image) -> Converter:
    """Return the function that scales the range of the pixels to 0...255; see `_range_limits`.

    The range is the smallest one that includes all pixels.

    Raises:
        ValueError: some pixels are not finite or negative, or all are so low that a smaller range
            may be meant.
    """
    limits, dtype = _range_limits(image)
    extrema: Any = image.getextrema()
    low, high = map(float, extrema)
    if not np.isfinite([low, high]).all():
        raise ValueError(_NOT_FINITE)
    if low < 0 and dtype == np.uint32:  # Pillow's integers are signed
        low = 0.0
        high = limits[-1]
    limit = next((limit for limit in limits if high <= limit), 0.0)
    is_clear = limit == limits[0] or high >= limit / _LEAST_SHARE
    if low < 0 or not limit or not is_clear:
        ranges = ", ".join(f"0 to {limit:.0f}" for limit in limits)
        raise ValueError(
            f"they are from {low:g} to {high:g}, and one of {ranges} is expected: scale them, or "
            "convert the picture to 8 bits per sample"
        )

    def scale(piece: Image.Image) -> Image.Image:
        values = np.asarray(piece).view(dtype).astype(np.float64)
        if not np.isfinite(values).all():
            raise ValueError(_NOT_FINITE)
        values *= 255 / limit
        values += 0.5
        return Image.fromarray(values.clip(0, 255, out=values).astype(np.uint8))

    return scale


def _range_limits(image: Image.Image) -> tuple[tuple[float, ...], Any]:
    """Return the highest values of the ranges that pixels may have, and the dtype of pixels."""
    if image.mode == "F":
        return (1.0, 255.0, 65535.0), np.float32
    tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
    if tags.get(258, (32,))[0] == 16:  # signed, because unsigned ones have modes of their own
        return (255.0, 32767.0), np.int32
    dtype = np.uint32 if tags.get(339, (1,))[0] == 1 else np.int32
    return (255.0, 65535.0, float(np.iinfo(dtype).max)), dtype
