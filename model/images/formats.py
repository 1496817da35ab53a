"""Recognise the format of an image file by its first bytes; a declared type is ignored.

To add a format, add Pillow's class to `READERS`, its first bytes to `MAGIC`, and its name to the
message of `format_of`. Further places know the formats:

    model.images.decode._open_image    whether the reader turns a picture upright
    model.data.listing                 suffixes of files in a folder
    service.web.upload                 first bytes of a body that is a picture, not a form or JSON
"""

import importlib
import importlib.util
import re

from PIL import ImageFile, features
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from model.errors import InvalidImage, UnsupportedImageFormat
from model.images import tiff

# Pillow's class for each format; None if this installation lacks the codec.
READERS: dict[str, type[ImageFile.ImageFile] | None] = {
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

# Formats that this installation reads, by Pillow's names.
SUPPORTED_FORMATS: tuple[str, ...] = tuple(
    name for name, reader in READERS.items() if reader is not None
)

MAGIC = re.compile(
    rb"(?P<JPEG>\xff\xd8\xff)|(?P<PNG>\x89PNG\r\n\x1a\n)|(?P<WEBP>RIFF.{4}WEBP)|(?P<GIF>GIF8[79]a)"
    rb"|(?P<TIFF>II[*+]\0|II\0\*|MM\0[*+]|MM\*\0)|(?P<BMP>BM)|(?P<ISO>.{4}ftyp)",
    re.DOTALL,
)
_AVIF_BRANDS = {b"avif", b"avis"}
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}

# Message for a raw photo or a TIFF whose first picture is a thumbnail.
RAW = (
    "raw photos are not decoded, nor are TIFFs that begin with a thumbnail, because the thumbnail "
    "would be classified instead of the photo; export the photo as JPEG"
)


def format_of(data: bytes | bytearray) -> str:
    """Return the format of a whole file, by Pillow's name.

    Raises:
        UnsupportedImageFormat: an unknown format, or a format that this installation cannot read.
        InvalidImage: the file is empty.
    """
    if not data:
        raise InvalidImage("the picture is empty: 0 bytes")
    if tiff.is_raw(data):
        raise UnsupportedImageFormat(RAW)
    match = MAGIC.match(data)
    if match is None:
        raise UnsupportedImageFormat(
            "not a picture of an allowed format: JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"
        )
    name = _brand(data) if match.lastgroup == "ISO" else str(match.lastgroup)
    if name == "TIFF" and tiff.is_thumbnail(data):
        raise UnsupportedImageFormat(RAW)
    if READERS[name] is None:
        hint = ": pip install 'vitserve[heic]' adds them" if name == "HEIF" else " by this Pillow"
        raise UnsupportedImageFormat(f"{name} pictures are not supported{hint}")
    return name


def _brand(data: bytes | bytearray) -> str:
    """Return the format of an ISO media file."""
    # Several formats share this container. The brands in the first box identify them (ISO/IEC
    # 23008-12).
    end = min(int.from_bytes(data[:4], "big"), 256)
    brands = {bytes(data[start : min(start + 4, end)]) for start in range(8, end, 4)}
    if brands & _AVIF_BRANDS:
        return "AVIF"
    if brands & _HEIC_BRANDS:
        return "HEIF"
    raise UnsupportedImageFormat("an ISO media file that is neither AVIF nor HEIC")
