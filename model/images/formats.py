"""The formats of image files: how each is recognised, and read up to its pixels.

The first bytes tell the format; a declared type is ignored. JPEG files are stripped of metadata
after their orientation is read; PNG files too, by `model.images.png`.

To add a format, add Pillow's class to `READERS`, its first bytes to `MAGIC`, and its name to the
message of `format_of`. Further places know the formats:

    model.images.decode._open_image    whether the reader turns a picture upright
    model.images.listing               suffixes of files in a folder
"""

import importlib
import importlib.util
import re
import struct
import sys
from collections.abc import Iterator
from itertools import islice
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

_SEND_A_FRAME: Final = "send a frame of a video as JPEG"
_CONVERT: Final = "convert it to JPEG or PNG"
_CHANGED_LINE_ENDS: Final = "whose line ends were changed: transfer it in binary mode"

_AS_IT_IS: Final = "send the file from its own first byte on"
_SIGNATURES: Final = rb"(\xff\xd8\xff|\x89PNG\r\n|GIF8[79]a|RIFF.{4}WEBP)"

# First bytes of files that people send instead of a picture, and what a message calls them.
_OTHER_KINDS: Final = tuple(
    (re.compile(magic, re.DOTALL), kind)
    for magic, kind in (
        (rb"\xff\x0a|.{4}JXL ", f"a JPEG XL picture: {_CONVERT}"),
        (rb".{4}jP  |\xff\x4f\xff\x51", f"a JPEG 2000 picture: {_CONVERT}"),
        (rb"8BPS", f"a Photoshop document: {_CONVERT}"),
        (rb"\0\0[\x01\x02]\0[^\0]\0|icns", f"an icon: {_CONVERT}"),
        (
            rb".(\0[\x02\x03\x0a\x0b]\0{5}|\x01[\x01\x09]\0\0..[\x0f\x10\x18\x20])"
            rb".{8}[\x08\x0f\x10\x18\x20]",
            f"a TGA picture: {_CONVERT}",
        ),
        (rb"P[1-7Ff]\s", f"a Netpbm picture: {_CONVERT}"),
        (rb".{128}DICM", f"a DICOM picture: {_CONVERT}"),
        (rb"v/1\x01|#\?RADIANCE", f"an HDR picture: {_CONVERT}"),
        (rb"\x89PNG[\r\n]+\x1a", f"a PNG {_CHANGED_LINE_ENDS}"),
        (rb"\x93NUMPY", "a NumPy array: encode it as PNG"),
        (rb"\x1aE\xdf\xa3|RIFF.{4}AVI |\0\0\x01[\xb3\xba]|FLV", f"a video: {_SEND_A_FRAME}"),
        (
            rb"PK\x03\x04|\x1f\x8b|BZh|7z\xbc\xaf|Rar!|\xfd7zXZ|\x28\xb5\x2f\xfd|.{257}ustar",
            "an archive or a compressed file: send the pictures in it",
        ),
        (rb"\xef\xbb\xbf" + _SIGNATURES, f"one after a byte order mark (EF BB BF): {_AS_IT_IS}"),
        (b".{1,32}?" + _SIGNATURES, f"one after stray bytes, as a line break: {_AS_IT_IS}"),
    )
)

# In a JPEG, one line feed in 256 follows a carriage return by chance.
_TEXT_LINES: Final = 4

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
    if _RAW.match(data):  # in any container
        raise UnsupportedImageFormat(RAW)
    match = MAGIC.match(data)
    if match is None:
        kind = next((f", but {kind}" for magic, kind in _OTHER_KINDS if magic.match(data)), "")
        raise UnsupportedImageFormat(
            f"not a picture of an allowed format: JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF{kind}"
        )
    name = _brand(data) if match.lastgroup == "ISO" else str(match.lastgroup)
    if name == "JPEG" and _has_text_line_ends(data):
        raise UnsupportedImageFormat(f"a JPEG {_CHANGED_LINE_ENDS}")
    if name == "TIFF" and is_thumbnail(data):
        raise UnsupportedImageFormat(RAW)
    if READERS[name] is None:
        hint = ": pip install 'vitserve[heic]' adds them" if name == "HEIF" else " by this Pillow"
        raise UnsupportedImageFormat(f"{name} pictures are not supported{hint}")
    return name


def is_picture(data: bytes | bytearray) -> bool:
    """Return whether a file begins like one of the known formats."""
    return MAGIC.match(data) is not None


def _has_text_line_ends(data: bytes | bytearray) -> bool:
    """Return whether each line feed follows a carriage return, as after a transfer as text."""
    count = 0
    feed = data.find(b"\n")
    while feed > 0:
        if data[feed - 1] != ord("\r"):
            return False
        count += 1
        feed = data.find(b"\n", feed + 1)
    return count >= _TEXT_LINES


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
    raise UnsupportedImageFormat(
        f"an ISO media file that is neither AVIF nor HEIC; {_SEND_A_FRAME}"
    )


# TIFF

# First bytes of cameras' raw files: Olympus, Panasonic, Fujifilm, Sigma, Minolta, Canon's CR3,
# CR2 and CRW. Only CR2 is a TIFF.
_RAW: Final = re.compile(
    rb"IIR[OS]\x08\0|MMOR\0|IIU\0|FUJIFILMCCD-RAW|FOVb|\0MRM|.{4}ftypcrx |II\*\0.{4}CR[\x02-\x09]"
    rb"|II\x1a\0.{2}HEAPCCDR",
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

# Format characters of `struct` for the field types of unsigned integers (TIFF 6.0, section 2).
_INTEGERS: Final = {1: "B", 3: "H", 4: "L", 13: "L", 16: "Q"}
_MOST_ENTRIES: Final = 4096


def is_thumbnail(data: bytes | bytearray) -> bool:
    """Return whether a TIFF is a raw photo, or begins with a reduced copy of another picture.

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
        if kind in _INTEGERS:
            (tags[tag],) = struct.unpack_from(f"{order}{_INTEGERS[kind]}", value)
        else:
            tags.setdefault(tag, 0)
    return tags


# JPEG (ITU-T T.81, annex B). A multi-picture MPO begins with a whole JPEG and is read as JPEG.

UPRIGHT = 1

# Most segments or chunks of a file. Valid files have at most a few thousand.
MAX_PARTS = 16_384

_MARKER = re.compile(rb"\xff[^\x00\xff]")
# Markers without a length field, in libjpeg's and Pillow's view: TEM, RST, SOI, EOI and the
# reserved JPGn.
_STANDALONE = {0x01, *range(0xD0, 0xDA), 0xC8, *range(0xF0, 0xFE)}

_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_ARITHMETIC = {marker for marker in _FRAMES if marker > 0xC8}
_SEQUENTIAL = {0xC0, 0xC1}
_PROGRESSIVE = {0xC2}
_SCAN = 0xDA
_APP1 = 0xE1
_METADATA = {*range(0xE0, 0xF0), 0xFE}
# Application segments that give the colour space of the components.
_COLOUR_SEGMENTS = (b"JFIF\0", b"Adobe")

_EXIF = b"Exif\0\0"
_XMP: Final = b"http://ns.adobe.com/xap/1.0/\0"

# The orientation in XMP, as Pillow finds it: an attribute or an element.
_XMP_ORIENTATION: Final = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')

# Most bytes of XMP that are searched.
MAX_XMP: Final = 1_048_576

_MAX_BOUNDED_SEGMENTS = 256
_MAX_BOUNDED_JPEG = 16_777_216
# Photos of 24 megapixels pass. They decode in 0.1 to 0.3 s.
_MAX_BOUNDED_PIXELS = 26_000_000

# Most bytes between two segments of a bounded file. Valid files have at most a few fill bytes.
_MAX_GAP = 16


def is_bounded_jpeg(data: bytes | bytearray) -> bool:
    """Return whether the header bounds the decoding work: one Huffman-coded scan of moderate size.

    A file with several scans, such as a progressive file, is not bounded. It may have any number of
    scans, and each covers the whole picture.
    """
    size = size_of_one_scan(data)
    if size is None or len(data) > _MAX_BOUNDED_JPEG:
        return False
    width, height = size
    return width * height <= _MAX_BOUNDED_PIXELS


def size_of_one_scan(data: bytes | bytearray) -> tuple[int, int] | None:
    """Return (width, height) of a file whose first Huffman-coded scan is all of it, else None."""
    frame = b""
    for marker, _, start, end in islice(_segments(data, _MAX_GAP), _MAX_BOUNDED_SEGMENTS):
        if marker == _SCAN:
            # The samples have 8 bits, and the scan has all components.
            if frame[2:3] != b"\x08" or data[start + 2 : start + 3] < frame[7:8]:
                return None
            return int.from_bytes(frame[5:7], "big"), int.from_bytes(frame[3:5], "big")
        if marker in _FRAMES:
            if marker not in _SEQUENTIAL:
                return None
            frame = bytes(data[start:end])
    return None


def strip_jpeg(data: bytes | bytearray) -> tuple[bytes, int, int]:
    """Return the file without application segments and comments, with two facts about it.

    These are the orientation from those segments, and the position of the first scan.

    Raises:
        InvalidImage: the file has too many segments, or its frame is lossless or hierarchical.
        UnsupportedImageFormat: arithmetic coding; its decoder reads zeros past the end of the data
            forever.
    """
    view = memoryview(data)
    kept = [view[:2]]
    exif = None
    xmp = None
    scan = view[:0]
    for marker, begin, start, end in _segments(data, sys.maxsize):
        if marker == _SCAN:
            scan = view[begin:]
            break
        if marker in _ARITHMETIC:
            raise UnsupportedImageFormat(
                "JPEG pictures with arithmetic coding are not read: no browser shows them"
            )
        if marker in _FRAMES - _SEQUENTIAL - _PROGRESSIVE:
            raise InvalidImage("the JPEG picture does not decode: it is lossless or hierarchical")
        if marker not in _METADATA or data.startswith(_COLOUR_SEGMENTS, start + 2):
            kept.append(view[begin:end])
        elif exif is None and marker == _APP1 and data.startswith(_EXIF, start + 2):
            exif = bytes(view[start + 2 : end])
        elif marker == _APP1 and data.startswith(_XMP, start + 2):
            xmp = view[start + 2 : end]
    stripped = b"".join([*kept, scan])
    return stripped, read_orientation(exif, xmp), len(stripped) - len(scan)


def _segments(data: bytes | bytearray, max_gap: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (marker, begin, start of payload, end) of each segment, up to a gap above `max_gap`.

    Fill bytes and other bytes before a marker are legal. Pillow skips them one by one in Python.
    """
    size = len(data)
    position = 2
    for _ in range(MAX_PARTS):
        begin = position
        if begin + 2 > size or data[begin] != 0xFF or data[begin + 1] in (0x00, 0xFF):
            match = _MARKER.search(data, position, min(position + max_gap, size))
            if match is None:
                return
            begin = match.start()
        marker = data[begin + 1]
        start = begin + 2
        position = start
        if marker not in _STANDALONE:
            length = data[start] << 8 | data[start + 1] if start + 2 <= size else 0
            position += length if length > 2 else 2
        yield marker, begin, start, position
    raise InvalidImage(f"the file is made of more than {MAX_PARTS} parts")


def read_orientation(exif: bytes | None, xmp: bytes | memoryview | None) -> int:
    """Return the orientation 1...8 from Exif, else from XMP; 1, upright, if neither states it.

    Args:
        exif: with or without its prefix, which some writers repeat.
        xmp: the packet; only its first `MAX_XMP` bytes are searched.
    """
    orientation = _exif_orientation(exif)
    if orientation is None and xmp:
        match = _XMP_ORIENTATION.search(xmp, 0, MAX_XMP)
        if match:
            orientation = int(match[1])
    if orientation is None or not 1 <= orientation <= 8:
        return UPRIGHT
    return orientation


def _exif_orientation(exif: bytes | None) -> int | None:
    """Return the value of Exif's tag 274 (CIPA DC-008), 0 if not an integer; None without the tag.

    This function reads no other tag. A general reader builds a table of all tags, and a few
    kilobytes of overlapping tags can make that table take hundreds of megabytes.
    """
    exif = (exif or b"").removeprefix(_EXIF).removeprefix(_EXIF)
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return None
    try:
        (directory,) = struct.unpack_from(order + "L", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHL", exif, entry)
            if tag == 274 and count:
                if kind not in _INTEGERS:
                    return 0
                return int(struct.unpack_from(order + _INTEGERS[kind], exif, entry + 8)[0])
    except struct.error:  # truncated
        pass
    return None
