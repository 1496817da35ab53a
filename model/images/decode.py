"""Decoding of bytes to one Pillow image, to the end of the file, with bounds on pixels and memory.

    bytes -> format -> unpacked (what the decoder has to see) -> opened, checked -> decoded

The format is recognised by a file's first bytes; the declared type is ignored. Pillow's reader of
that format is called by itself: `PIL.Image.open` would try others too. A JPEG or PNG whose header
bounds the work may be decoded beside other work (`is_bounded`). What any other file costs is
bounded only by the limits of the process that decodes it (`model.images.decoder_process`).

Of JPEG and PNG the decoder gets the first picture's data only, byte for byte. Metadata, thumbnails
and comments are left out once the orientation is read: Pillow spends time and memory on them, in
Python and so under the interpreter's lock, that a hostile file can drive up without bound and that
a classifier has no use for.

Pillow's own pixel limit is left alone, as it holds for the whole process; ours is checked for every
picture, before its pixels are allocated. `converter` then makes RGB or grey of any mode, a piece of
the picture at a time.
"""

import importlib
import importlib.util
import io
import re
import struct
import zlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageFile, features
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from model.errors import ImageTooCostly, ImageTooLarge, InvalidImage, UnsupportedImageFormat
from model.images import jpeg, png, tiff
from model.images.jpeg import UPRIGHT, read_orientation

# Pillow's classes that decode each format; None where this installation has no codec for it.
_READERS: dict[str, type[ImageFile.ImageFile] | None] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile if features.check("webp") else None,
    "GIF": GifImageFile,
    "TIFF": TiffImageFile,
    "AVIF": AvifImageFile if features.check("avif") else None,
    "BMP": BmpImageFile,
    "HEIF": importlib.import_module("pillow_heif").HeifImageFile
    if importlib.util.find_spec("pillow_heif")
    else None,
}

# Formats that this installation reads, as Pillow names them.
SUPPORTED_FORMATS: tuple[str, ...] = tuple(
    name for name, reader in _READERS.items() if reader is not None
)

_MAGIC = re.compile(
    rb"(?P<JPEG>\xff\xd8\xff)|(?P<PNG>\x89PNG\r\n\x1a\n)|(?P<WEBP>RIFF.{4}WEBP)|(?P<GIF>GIF8[79]a)"
    rb"|(?P<TIFF>II[*+]\0|II\0\*|MM\0[*+]|MM\*\0)|(?P<BMP>BM)|(?P<ISO>.{4}ftyp)",
    re.DOTALL,
)
_AVIF_BRANDS = {b"avif", b"avis"}
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}

# Bytes of the file that a decoder gets at a time: most pictures at once.
_PIECE_BYTES = 262_144

RAW = (
    "raw photos are not decoded, nor TIFFs that begin with a thumbnail: it would be classified in place of the photo; "
    "export the photo as JPEG"
)

Converter = Callable[[Image.Image], Image.Image]

_GREY = ("1", "L", "LA", "La")
# Modes that Pillow converts to grey or RGB only by way of others.
_ROUTES: dict[str, tuple[str, ...]] = {"La": ("LA",), "LAB": ("RGB",)}

DEFAULT_MAX_PIXELS = 64_000_000

# What Pillow's readers and the libraries below them raise on broken bytes. They index, unpack and
# divide numbers taken from the file, so that a broken file surfaces as whatever that operation
# raises; RuntimeError is libavif's and libheif's general error, ImportError a Pillow built without
# the codec that a file asks for.
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

# Pixels of one side. A resize holds filter weights for every pixel of a side, 48 bytes of them at
# most.
MAX_SIDE = 1_048_576

# From an upright (width, height) in pixels to the smallest (width, height) that it may be decoded
# at.
MinSize = Callable[[int, int], tuple[int, int]]


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


def is_bounded(data: bytes | bytearray) -> bool:
    """Return whether the header of a file bounds the work of decoding it: less than 0.5 s and 180
    MB.

    It looks at a few hundred bytes of the file.
    """
    match = _MAGIC.match(data)
    if match is None:  # refused at once
        return True
    return {"JPEG": jpeg.is_bounded, "PNG": png.is_bounded}.get(
        match.lastgroup or "", lambda _: False
    )(data)


def decode(
    data: bytes | bytearray, *, max_pixels: int, min_size: MinSize | None = None
) -> DecodedImage:
    """Return the first picture in a file, all of it decoded. Thread-safe.

    How long that takes and how much memory is bounded for files that are bounded (`is_bounded`);
    for others, by the limits of the process (`model.images.decoder_process`).

    Args:
        data: the whole file.
        max_pixels: how many pixels the picture may have. Of WebP, GIF and TIFF, Pillow itself
            refuses more than twice `PIL.Image.MAX_IMAGE_PIXELS`, too.
        min_size: the smallest size that a large JPEG may be decoded at; None decodes at full size.

    Raises:
        UnsupportedImageFormat: not the magic of an allowed format, or a format that this
        installation cannot read.
        ImageTooLarge: too many pixels; raised before they are allocated.
        ImageTooCostly: there is not enough memory to decode it.
        InvalidImage: empty, truncated or corrupt.
    """
    name = _format_of(data)
    if name == "GIF":
        _check_pixels(_gif_size(data), max_pixels)
    try:
        image, orientation = _open_image(name, data)
        size = image.size
        _check_pixels(size, max_pixels)
        scale = 1
        if min_size is not None and name == "JPEG":
            scale = _draft(image, min_size, swapped=(orientation or UPRIGHT) >= 5)
        image.load()
        if scale == 1:  # Pillow turns a TIFF as it loads it
            size = image.size
        if orientation is None:
            orientation = read_orientation(image.info.get("exif"))
    except Image.DecompressionBombError as error:
        raise ImageTooLarge(f"the {name} picture is larger than Pillow decodes: {error}") from error
    except MemoryError as error:
        raise ImageTooCostly(
            f"decoding this {name} picture takes more memory than is allowed"
        ) from error
    except DECODE_ERRORS as error:
        raise InvalidImage(f"the {name} picture does not decode: {_reason(error)}") from error
    return DecodedImage(image, size, scale, orientation)


def _format_of(data: bytes | bytearray) -> str:
    """Return the format of a whole file, as Pillow names it.

    Raises:
        UnsupportedImageFormat: not the magic of an allowed format, or a format that this
        installation cannot read.
        InvalidImage: empty.
    """
    if not data:
        raise InvalidImage("the picture is empty: 0 bytes")
    if tiff.is_raw(data):
        raise UnsupportedImageFormat(RAW)
    match = _MAGIC.match(data)
    if match is None:
        raise UnsupportedImageFormat(
            "not a picture of an allowed format: JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"
        )
    name = _brand(data) if match.lastgroup == "ISO" else str(match.lastgroup)
    if name == "TIFF" and tiff.is_thumbnail(data):
        raise UnsupportedImageFormat(RAW)
    if _READERS[name] is None:
        hint = ": pip install 'vitserve[heic]' adds them" if name == "HEIF" else " by this Pillow"
        raise UnsupportedImageFormat(f"{name} pictures are not supported{hint}")
    return name


def _open_image(name: str, data: bytes | bytearray) -> tuple[ImageFile.ImageFile, int | None]:
    """Return Pillow's image, its header read and its pixels not yet decoded, of a file without what
    need not be seen.

    Args:
        name: of `_format_of`.
        data: the whole file; no reference to a bytearray is kept.

    Returns:
        The image, and its Exif orientation 1...8, or None where only the reader can tell.

    Raises:
        UnsupportedImageFormat: a kind of AVIF or JPEG that is not read.
        InvalidImage: cut off before the first picture begins, or made of absurdly many parts.
        Exception: see `DECODE_ERRORS`.
    """
    # Pillow and libheif turn TIFF and HEIC upright; GIF and BMP have no orientation.
    orientation = None if name in ("WEBP", "AVIF") else UPRIGHT
    if name in ("JPEG", "PNG"):
        data, orientation = (jpeg if name == "JPEG" else png).strip(data)
    reader = _READERS[name]
    assert reader is not None, "_format_of refuses it"
    try:
        image = reader(io.BytesIO(data))
    except SyntaxError as error:
        # libavif says this of a file that is cut off, and of one that lacks a required property.
        if "BMFF" in str(error) and _has_whole_boxes(data):
            raise UnsupportedImageFormat(
                "this AVIF picture is of a kind that libavif does not read"
            ) from error
        raise
    image.decodermaxblock = _PIECE_BYTES
    return image, orientation


def _brand(data: bytes | bytearray) -> str:
    """Return the format of an ISO media file."""
    # The brands in the first box tell the formats apart that share this container (ISO/IEC
    # 23008-12).
    end = min(int.from_bytes(data[:4], "big"), 256)
    brands = {bytes(data[start : min(start + 4, end)]) for start in range(8, end, 4)}
    if brands & _AVIF_BRANDS:
        return "AVIF"
    if brands & _HEIC_BRANDS:
        return "HEIF"
    raise UnsupportedImageFormat("an ISO media file that is neither AVIF nor HEIC")


def _gif_size(data: bytes | bytearray) -> tuple[int, int]:
    """Return the size of the canvas that all frames of a GIF need, which a player would allocate
    (GIF89a).
    """
    width = height = 0
    try:
        canvas_width, canvas_height, flags = struct.unpack_from("<HHB", data, 6)
        position = 13 + _palette_bytes(flags)
        while (kind := data[position]) in b"!,":
            position += 2
            if kind == ord(","):
                left, top, columns, rows, flags = struct.unpack_from("<HHHHB", data, position - 1)
                width = max(width, canvas_width, left + columns)
                height = max(height, canvas_height, top + rows)
                position += 9 + _palette_bytes(flags)
            while block := data[position]:
                position += 1 + block
            position += 1
    except (
        struct.error,
        IndexError,
    ):  # cut off, as the decoder will say if it is within the first frame
        pass
    return width, height


def _palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _has_whole_boxes(data: bytes | bytearray) -> bool:
    """Return whether the top boxes of an ISO media file fill it."""
    position = 0
    while 0 <= position < len(data):
        size = int.from_bytes(data[position : position + 4], "big")
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        position = position + size if size >= 8 else len(data) if size == 0 else -1
    return position == len(data)


def _draft(image: Image.Image, min_size: MinSize, *, swapped: bool) -> int:
    """Let the decoder of a JPEG scale it down by 2, 4 or 8, as far as `min_size` allows; return
    that factor, else 1.
    """
    width, height = image.size
    min_width, min_height = min_size(height, width)[::-1] if swapped else min_size(width, height)
    for scale in (8, 4, 2):
        if width >= scale * min_width and height >= scale * min_height:
            # Pillow takes the largest scale that leaves at least this size: the scale of this loop.
            image.draft(None, (width // scale, height // scale))
            return scale
    return 1


def _check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ImageTooLarge(
            f"the picture has {width} x {height} pixels: at most {max_pixels} are allowed (VIT_MAX_IMAGE_PIXELS)"
        )
    if max(width, height) > MAX_SIDE:
        raise ImageTooLarge(
            f"the picture has {width} x {height} pixels: a side may have at most {MAX_SIDE}"
        )


def _reason(error: BaseException) -> str:
    """Return the reader's message, in one line for the sender; not that of an accident inside it."""
    text = error.args[0] if error.args else None
    if isinstance(error, OSError | RuntimeError | SyntaxError | ValueError) and isinstance(
        text, str
    ):
        return " ".join(text.split())[:160]
    return "it is truncated or corrupt"


def converter(image: Image.Image, mode: Literal["RGB", "L"]) -> Converter | None:
    """Return what converts any piece of `image` as `convert(mode)` would the whole; None if nothing
    is to convert.

    Alpha is dropped, not blended, and ICC profiles are ignored. Two modes Pillow would clip are
    scaled:

    * 16-bit grey (I;16, I;16B, I;16L, I;16N) to its high byte, as Pillow reads 16-bit colour.
    * 32-bit integers and floats (I, F), whose range no file format states, from the smallest of 0...1 (F only),
      0...255 and 0...65535 that holds every pixel, else from the picture's own minimum to its
      maximum. ValueError where one is not finite.

    Args:
        image: loaded; its `info` loses the transparent colour, which would only cost time here.
        mode: RGB or L. A grey picture stays L under RGB too: its three channels would be equal, and
            one is resized in a third of the time.
    """
    image.info.pop("transparency", None)
    stored = image.mode
    if stored in (mode, "L"):
        return None
    if stored.startswith("I;16"):
        # Pillow hands 16-bit pixels over in the machine's byte order or names another order in the
        # dtype.
        return lambda piece: Image.fromarray((np.asarray(piece) >> 8).astype(np.uint8))
    if stored in ("I", "F"):
        return _scaler(image)
    route = _ROUTES.get(stored, ()) + (("L",) if stored in _GREY else (mode,))

    def convert(piece: Image.Image) -> Image.Image:
        for step in route:
            piece = piece.convert(step)
        return piece

    return convert


def _scaler(image: Image.Image) -> Converter:
    """Return the function that maps the range that the pixels are likely meant to have to 0...255."""
    extrema: Any = image.getextrema()
    low, high = map(float, extrema)
    nominal = [each for each in (1.0, 255.0, 65535.0) if each > 1 or image.mode == "F"]
    if low >= 0:
        low, high = next(((0.0, each) for each in nominal if high <= each), (low, high))
    factor = 255.0 / (high - low) if high > low else 0.0

    def scale(piece: Image.Image) -> Image.Image:
        # Doubles: the span of the numbers may be wider than a 32-bit integer or float can say.
        values = np.asarray(piece).astype(np.float64)
        if not np.isfinite([low, high, values.min(), values.max()]).all():
            raise ValueError("it has numbers that are not finite")
        values -= low
        values *= factor
        values += 0.5
        return Image.fromarray(values.clip(0, 255, out=values).astype(np.uint8))

    return scale
