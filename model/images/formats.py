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
import struct
from typing import Final

from PIL import ImageFile, features
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from model.errors import InvalidImage, UnsupportedImageFormat

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

# First bytes of cameras' raw files: Olympus, Panasonic, Fujifilm, Sigma, Minolta, Canon's CR3 and
# CR2. Only CR2 is a TIFF.
_RAW: Final = re.compile(
    rb"IIR[OS]\x08\0|MMOR\0|IIU\0|FUJIFILMCCD-RAW|FOVb|\0MRM|.{4}ftypcrx |II\*\0.{4}CR[\x02-\x09]",
    re.DOTALL,
)

_NEW_SUBFILE_TYPE: Final = 254
_SUBFILE_TYPE: Final = 255
_PHOTOMETRIC: Final = 262
_CFA_PATTERN: Final = 33421
_DNG_VERSION: Final = 50706

_REDUCED: Final = 1
_OLD_REDUCED: Final = 2
_SENSOR: Final = (32803, 34892)  # colour filter array, linear raw

_FORMATS: Final = {1: "B", 3: "H", 4: "L", 13: "L", 16: "Q"}
_MOST_ENTRIES: Final = 4096


def format_of(data: bytes | bytearray) -> str:
    """Return the format of a whole file, by Pillow's name.

    Raises:
        UnsupportedImageFormat: an unknown format, or a format that this installation cannot read.
        InvalidImage: the file is empty.
    """
    if not data:
        raise InvalidImage("the picture is empty: 0 bytes")
    if _is_raw(data):
        raise UnsupportedImageFormat(RAW)
    match = MAGIC.match(data)
    if match is None:
        raise UnsupportedImageFormat(
            "not a picture of an allowed format: JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"
        )
    name = _brand(data) if match.lastgroup == "ISO" else str(match.lastgroup)
    if name == "TIFF" and is_thumbnail(data):
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


def _is_raw(data: bytes | bytearray) -> bool:
    """Return whether the first bytes of a file mark a raw photo, in any container."""
    return _RAW.match(data) is not None


def is_thumbnail(data: bytes | bytearray) -> bool:
    """Return whether a TIFF is a raw photo, or its first picture a reduced copy of another.

    Cameras' raw photos are TIFFs whose first picture is a thumbnail or a preview, often of a
    hundred pixels. Pillow reads that picture without a warning.

    See TIFF 6.0, BigTIFF, and DNG 1.7, chapter 4. Return False for a damaged directory, because
    the decoder refuses that.
    """
    try:
        tags = _first_directory(data)
    except (struct.error, ValueError):
        return False
    if _DNG_VERSION in tags or _CFA_PATTERN in tags or tags.get(_PHOTOMETRIC) in _SENSOR:
        return True
    return (
        bool(tags.get(_NEW_SUBFILE_TYPE, 0) & _REDUCED) or tags.get(_SUBFILE_TYPE) == _OLD_REDUCED
    )


def _first_directory(data: bytes | bytearray) -> dict[int, int]:
    """Return the first value of each tag in the first directory.

    Integers are read from the entry itself. A tag of another type has the value 0.
    """
    order = "<" if data[:2] == b"II" else ">"
    is_big = 43 in struct.unpack_from("<H", data, 2) + struct.unpack_from(">H", data, 2)
    offset, count_format, entry = (8, "Q", "HHQ8s") if is_big else (4, "H", "HHL4s")
    (start,) = struct.unpack_from(f"{order}{'Q' if is_big else 'L'}", data, offset)
    (count,) = struct.unpack_from(f"{order}{count_format}", data, start)
    if count > _MOST_ENTRIES:
        raise ValueError("too many entries")
    first = start + struct.calcsize(f"={count_format}")
    size = struct.calcsize(f"={entry}")
    tags: dict[int, int] = {}
    for position in range(first, first + count * size, size):
        tag, kind, _, value = struct.unpack_from(f"{order}{entry}", data, position)
        if kind in _FORMATS:
            (tags[tag],) = struct.unpack_from(f"{order}{_FORMATS[kind]}", value)
        else:
            tags.setdefault(tag, 0)
    return tags
