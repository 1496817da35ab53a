"""Image formats: recognised by a file's first bytes, and read by Pillow's class for the format.

The declared type is ignored. A JPEG or PNG whose header bounds the work may be decoded beside other work
(`is_bounded`). What any other file costs is bounded only by the limits of the process that decodes it
(`model.images.decoder_process`).

Of JPEG and PNG the decoder gets the first picture's data only, byte for byte. Metadata, thumbnails and comments are
left out once the orientation is read: Pillow spends time and memory on them, in Python and so under the interpreter's
lock, that a hostile file can drive up without bound and that a classifier has no use for.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import re
import struct

from PIL import ImageFile, features
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from model.errors import InvalidImage, UnsupportedImageFormat
from model.images import jpeg, png
from model.images.jpeg import UPRIGHT

# Pillow's classes that decode each format; None where this installation has no codec for it.
_READERS: dict[str, type[ImageFile.ImageFile] | None] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile if features.check("webp") else None,
    "GIF": GifImageFile,
    "TIFF": TiffImageFile,
    "AVIF": AvifImageFile if features.check("avif") else None,
    "BMP": BmpImageFile,
    "HEIF": importlib.import_module("pillow_heif").HeifImageFile if importlib.util.find_spec("pillow_heif") else None,
}

# Formats that this installation reads, as Pillow names them.
SUPPORTED_FORMATS: tuple[str, ...] = tuple(name for name, reader in _READERS.items() if reader is not None)

_MAGIC = re.compile(
    rb"(?P<JPEG>\xff\xd8\xff)|(?P<PNG>\x89PNG\r\n\x1a\n)|(?P<WEBP>RIFF.{4}WEBP)|(?P<GIF>GIF8[79]a)"
    rb"|(?P<TIFF>II[*+]\0|II\0\*|MM\0[*+]|MM\*\0)|(?P<BMP>BM)|(?P<ISO>.{4}ftyp)",
    re.DOTALL,
)
_AVIF_BRANDS = {b"avif", b"avis"}
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}

# Bytes of the file that a decoder gets at a time: most pictures at once.
_PIECE_BYTES = 262_144


def is_bounded(data: bytes | bytearray) -> bool:
    """Return whether the header of a file bounds the work of decoding it: less than 0.5 s and 180 MB.

    It looks at a few hundred bytes of the file.
    """
    match = _MAGIC.match(data)
    if match is None:  # refused at once
        return True
    return {"JPEG": jpeg.is_bounded, "PNG": png.is_bounded}.get(match.lastgroup or "", lambda _: False)(data)


def format_of(data: bytes | bytearray) -> str:
    """Return the format of a whole file, as Pillow names it.

    Raises:
        UnsupportedImageFormat: not the magic of an allowed format, or a format that this installation cannot read.
        InvalidImage: empty.
    """
    if not data:
        raise InvalidImage("the picture is empty: 0 bytes")
    match = _MAGIC.match(data)
    if match is None:
        raise UnsupportedImageFormat("not a picture of an allowed format: JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF")
    name = _brand(data) if match.lastgroup == "ISO" else str(match.lastgroup)
    if _READERS[name] is None:
        hint = ": pip install 'vitserve[heic]' adds them" if name == "HEIF" else " by this Pillow"
        raise UnsupportedImageFormat(f"{name} pictures are not supported{hint}")
    return name


def open_image(name: str, data: bytes | bytearray) -> tuple[ImageFile.ImageFile, int | None]:
    """Return Pillow's image, its header read and its pixels not yet decoded, of a file without what need not be seen.

    Args:
        name: of `format_of`.
        data: the whole file; no reference to a bytearray is kept.

    Returns:
        The image, and its Exif orientation 1...8, or None where only the reader can tell.

    Raises:
        UnsupportedImageFormat: a kind of AVIF or JPEG that is not read.
        InvalidImage: cut off before the first picture begins, or made of absurdly many parts.
        Exception: see `model.images.decode.DECODE_ERRORS`.
    """
    # Pillow and libheif turn TIFF and HEIC upright; GIF and BMP have no orientation.
    orientation = None if name in ("WEBP", "AVIF") else UPRIGHT
    if name in ("JPEG", "PNG"):
        data, orientation = (jpeg if name == "JPEG" else png).strip(data)
    reader = _READERS[name]
    assert reader is not None, "format_of refuses it"
    try:
        image = reader(io.BytesIO(data))
    except SyntaxError as error:
        # libavif says this of a file that is cut off, and of one that lacks a required property.
        if "BMFF" in str(error) and _has_whole_boxes(data):
            raise UnsupportedImageFormat("this AVIF picture is of a kind that libavif does not read") from error
        raise
    image.decodermaxblock = _PIECE_BYTES
    return image, orientation


def _brand(data: bytes | bytearray) -> str:
    """Return the format of an ISO media file."""
    # The brands in the first box tell the formats apart that share this container (ISO/IEC 23008-12).
    end = min(int.from_bytes(data[:4], "big"), 256)
    brands = {bytes(data[start : min(start + 4, end)]) for start in range(8, end, 4)}
    if brands & _AVIF_BRANDS:
        return "AVIF"
    if brands & _HEIC_BRANDS:
        return "HEIF"
    raise UnsupportedImageFormat("an ISO media file that is neither AVIF nor HEIC")


def gif_size(data: bytes | bytearray) -> tuple[int, int]:
    """Return the size of the canvas that all frames of a GIF need, which a player would allocate (GIF89a)."""
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
    except (struct.error, IndexError):  # cut off, as the decoder will say if it is within the first frame
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
