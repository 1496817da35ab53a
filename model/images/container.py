"""What an upload is, and what of it a decoder has to see.

Sniffs the format by its magic and takes the file apart: of JPEG, PNG, GIF and TIFF the decoder gets the first
picture's data only, byte for byte. Metadata, thumbnails, comments, further pictures and animation are left out
once the orientation is read: Pillow spends time and memory on them, in Python and so under the interpreter's
lock, that a hostile file can drive up without bound and that a classifier has no use for.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Literal

import numpy as np

from model.errors import InvalidImage, UnsupportedImageFormat
from model.images.exif import UPRIGHT, directory_orientation, orientation, read_directory

Format = Literal["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF"]
"""As Pillow and pillow-heif name their readers. A multi-picture MPO begins with a whole JPEG and is read as one."""

_MAX_PARTS = 65_536
"""Segments, chunks or blocks in a file. Honest files have at most a few thousand."""

_MAX_VALUES = 65_536
"""Values of one TIFF field, such as the places of the strips."""

_MAX_PROFILE_BYTES = 1_048_576
"""Size of an Exif block that ImageMagick hid in a PNG text."""

_MAX_RUN_LENGTH_BYTES = 2_097_152
"""Size of a run-length encoded BMP: Pillow decodes those in Python, run by run."""


@dataclass(frozen=True)
class Container:
    """A picture file, ready for its decoder.

    Attributes:
        format: which reader to give it to.
        data: the first picture, of most formats without metadata.
        orientation: Exif orientation 1...8; None: only the reader can tell, once the file is open.
        size: (width, height) in pixels, of formats whose reader allocates them as soon as the file is open.
        scans: JPEG: passes over the whole picture.
        buffered: JPEG: the decoder holds all coefficients before it makes the first pixel.
        scalable: JPEG: the decoder can make the picture at 1/2, 1/4 and 1/8.
        first_scan: progressive JPEG, Huffman codes: where in `data` the header of the first scan begins.
    """

    format: Format
    data: bytes
    orientation: int | None = None
    size: tuple[int, int] | None = None
    scans: int = 1
    buffered: bool = False
    scalable: bool = False
    first_scan: int | None = None


def unpack(data: bytes | bytearray) -> Container:
    """Sniff a file and leave out what its decoder need not see.

    Args:
        data: the whole file; the container keeps no hold of a bytearray.

    Raises:
        UnsupportedImageFormat: not the magic of an allowed format.
        InvalidImage: empty, cut off before the first picture begins, or made of absurdly many parts.
    """
    if not data:
        raise InvalidImage("the picture is empty: 0 bytes")
    if _JPEG_MAGIC.match(data):
        return _jpeg(data)
    for magic, opener in _OPENERS:
        if magic.match(data):
            return opener(bytes(data))
    raise UnsupportedImageFormat("not a picture of an allowed format: JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF")


def _parts() -> Iterator[int]:
    """Counts parts; more than any honest file has is an error."""
    yield from range(_MAX_PARTS)
    raise InvalidImage(f"the file is made of more than {_MAX_PARTS} parts")


# --- JPEG (ITU-T T.81, annex B) -----------------------------------------------------------------------------

_JPEG_MAGIC = re.compile(rb"\xff\xd8\xff")
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff]")
_JPEG_BARE = {0x01, *range(0xD0, 0xDA), 0xC8, *range(0xF0, 0xFE)}
"""Markers that no length follows, as libjpeg and Pillow take them: TEM, RST, SOI, EOI and the reserved JPGn."""

_JPEG_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_JPEG_PROGRESSIVE = {0xC2, 0xCA}
_JPEG_HUFFMAN_PROGRESSIVE = 0xC2
_JPEG_DCT = {0xC0, 0xC1, 0xC2, 0xC9, 0xCA}
"""Frames made of cosine transforms; only those can be scaled (a lossless one stays as large as it is)."""

_JPEG_SOS = 0xDA
_JPEG_SCAN, _JPEG_TABLES, _JPEG_RESTARTS, _JPEG_END = b"\xff\xda", b"\xff\xc4", b"\xff\xdd", b"\xff\xd9"
_JPEG_NO_DATA = re.compile(rb"\xff[^\x00]")
"""What cannot stand in the data of a scan without restarts: all but stuffed bytes."""

_JPEG_APP1 = 0xE1
_JPEG_METADATA = {*range(0xE0, 0xF0), 0xFE}
_JPEG_COLOUR = (b"JFIF\0", b"Adobe")
"""The application segments that say which colours the components are."""

_XMP_PREFIX = b"http://ns.adobe.com/xap/1.0/\0"

_SEARCHED_AT_ONCE = 1_048_576
"""Bytes; a few times as many are held meanwhile."""


def _jpeg(data: bytes | bytearray) -> Container:
    view = memoryview(data)
    kept = [view[:2]]
    exif = xmp = None
    frame, components = 0, 0
    position = 2
    scans, buffered, first_scan = 1, False, None
    for _ in _parts():
        # Fill bytes and rubbish before a marker are legal, and left out: Pillow goes through them one by one.
        found = _JPEG_MARKER.search(data, position)
        if found is None:
            break
        begin, marker, start = found.start(), found[0][1], found.end()
        if marker in _JPEG_BARE:
            kept.append(view[begin:start])
            position = start
            continue
        length = int.from_bytes(data[start : start + 2], "big")
        position = start + max(2, length)
        if marker == _JPEG_SOS:
            if frame == _JPEG_HUFFMAN_PROGRESSIVE:
                first_scan = sum(map(len, kept))
            kept.append(view[begin:])
            buffered = frame in _JPEG_PROGRESSIVE or data[start + 2 : start + 3] < bytes([components])
            scans = _scan_headers(data, start) + 1 if buffered else 1
            break
        if marker in _JPEG_METADATA and not data.startswith(_JPEG_COLOUR, start + 2):
            if marker == _JPEG_APP1:
                segment = bytes(view[start + 2 : position])
                if exif is None and segment.startswith(b"Exif\0\0"):
                    exif = segment
                elif xmp is None and segment.startswith(_XMP_PREFIX):
                    xmp = segment
        else:
            kept.append(view[begin:position])
        if marker in _JPEG_FRAMES:
            frame, components = marker, (data[start + 7 : start + 8] or b"\0")[0]
    return Container(
        "JPEG",
        b"".join(kept),
        orientation=orientation(exif, xmp),
        scans=scans,
        buffered=buffered,
        scalable=frame in _JPEG_DCT,
        first_scan=first_scan,
    )


def without_detail(jpeg: Container, scale: int, components: Set[int]) -> bytes | None:
    """A progressive JPEG's data without what some scans say, which does not show at 1/4 or 1/8 of the size.

    * At 1/8 libjpeg makes one sample of a block, from its mean (the DC coefficient): the other frequencies of
      components that are not subsampled change nothing. They are most of the file.
    * At 1/4 those components' lowest bit of the other frequencies is left out: with most encoders a third of the file.

    Whether the file is valid is not touched. All scan headers and tables stay, and are judged by the decoder, for
    which nothing between two markers of a scan's data is an error; that the data of every scan ends with a marker, and
    that the last is the end of the picture, is judged here.

    Args:
        jpeg: from `unpack`.
        scale: that it will be decoded at.
        components: identifiers of those that are not subsampled.

    Returns:
        None where there is nothing to leave out, or anything unusual.
    """
    data, position = jpeg.data, jpeg.first_scan
    if scale < 4 or position is None or _JPEG_RESTARTS in data[:position]:
        return None
    view = memoryview(data)
    kept: list[memoryview] = []
    done = 0
    for _ in range(_MAX_PARTS):
        marker, end = (
            data[position : position + 2],
            position + 2 + int.from_bytes(data[position + 2 : position + 4], "big"),
        )
        if marker == _JPEG_END:
            break
        if marker == _JPEG_SCAN:
            found = _JPEG_NO_DATA.search(data, end)
            if found is None:
                return None
            header = data[position + 4 : end]
            # Their number, of each its identifier and tables; first and last frequency, bits before and now.
            alone = len(header) == 6 and header[0] == 1 and header[1] in components
            if alone and header[3] > 0 and (scale == 8 or header[5] == 0x10):
                kept.append(view[done:end])
                done = found.start()
            end = found.start()
        elif marker != _JPEG_TABLES:
            return None
        position = end
    else:
        return None
    return b"".join((*kept, view[done : position + 2])) if kept else None


def _scan_headers(data: bytes | bytearray, start: int) -> int:
    """How often the marker that begins a scan stands in `data` from `start` on.

    As `bytes.count`, which takes 8 times as long on a megabyte and holds the interpreter's lock meanwhile.
    """
    searched = np.frombuffer(data, np.uint8)[start:]
    count = 0
    for first in range(0, len(searched), _SEARCHED_AT_ONCE):
        piece = searched[first : first + _SEARCHED_AT_ONCE + 1]
        count += int(np.count_nonzero((piece[:-1] == 0xFF) & (piece[1:] == _JPEG_SOS)))
    return count


# --- PNG (W3C PNG, third edition, section 5) ------------------------------------------------------------------

_PNG_PICTURE = {b"IHDR", b"PLTE", b"IDAT", b"IEND"}
_PNG_TEXTS = {b"tEXt", b"zTXt", b"iTXt"}
_PNG_XMP = b"XML:com.adobe.xmp\0"
_PNG_RAW_PROFILE = b"Raw profile type exif\0"


def _png(data: bytes) -> Container:
    view = memoryview(data)
    kept = [view[:8]]
    exif = raw_profile = xmp = None
    position = first = 8  # kept chunks that follow one another are kept as one slice
    for _ in _parts():
        length, kind = int.from_bytes(data[position : position + 4], "big"), data[position + 4 : position + 8]
        body, end = position + 8, position + 12 + length
        if kind not in _PNG_PICTURE and len(kind) == 4:
            kept.append(view[first:position])
            first = end
            if kind == b"eXIf":
                exif = data[body : end - 4]
            elif kind in _PNG_TEXTS and data.startswith(_PNG_XMP, body):
                xmp = data[body : end - 4]
            elif kind in _PNG_TEXTS and data.startswith(_PNG_RAW_PROFILE, body):
                raw_profile = _png_raw_profile(data[body + len(_PNG_RAW_PROFILE) : end - 4], packed=kind == b"zTXt")
        position = end
        if kind == b"IEND" or position >= len(data):
            break
    kept.append(view[first:position])
    return Container("PNG", b"".join(kept), orientation=orientation(exif or raw_profile, xmp))


def _png_raw_profile(text: bytes, *, packed: bool) -> bytes | None:
    """Exif as ImageMagick wrote it before PNG had a chunk for it: hexadecimal digits in a text chunk."""
    try:
        if packed:
            text = zlib.decompressobj().decompress(text[1:], _MAX_PROFILE_BYTES)
        # A line break, the name, the length, then the digits.
        return bytes.fromhex(b"".join(text[:_MAX_PROFILE_BYTES].split(b"\n")[3:]).decode("ascii"))
    except (ValueError, zlib.error):
        return None


# --- GIF (GIF89a specification) -------------------------------------------------------------------------------

_GIF_BLOCK = re.compile(rb"[!,;]")
_GIF_GRAPHIC_CONTROL = b"\xf9"


def _gif(data: bytes) -> Container:
    if len(data) < 13:
        raise InvalidImage("the GIF header is cut off")
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    header = position = 13 + _gif_palette_bytes(flags)
    control = b""
    picture = None
    for _ in range(_MAX_PARTS):
        found = _GIF_BLOCK.search(data, position)
        if found is None or found[0] == b";":
            break
        block = found.start()
        if found[0] == b",":
            if len(data) < block + 10:
                break
            # Every frame counts for the canvas: a player would have to allocate it.
            left, top, columns, rows, flags = struct.unpack_from("<HHHHB", data, block + 1)
            width, height = max(width, left + columns), max(height, top + rows)
            picture = block if picture is None else picture
            position = _gif_end(data, block + 11 + _gif_palette_bytes(flags))
        else:
            position = _gif_end(data, block + 2)
            if picture is None and data[block + 1 : block + 2] == _GIF_GRAPHIC_CONTROL:
                control = data[block:position]
    if picture is None:
        raise InvalidImage("the GIF file holds no picture")
    first = b"".join((data[:header], control, memoryview(data)[picture:]))
    return Container("GIF", first, orientation=UPRIGHT, size=(width, height))


def _gif_palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _gif_end(data: bytes, position: int) -> int:
    """Where the chain of data blocks that begins at `position` ends; the end of the file if it is too long."""
    for _ in range(_MAX_PARTS):
        if position >= len(data):
            break
        length = data[position]
        position += 1 + length
        if length == 0:
            return position
    return len(data)


# --- TIFF (TIFF 6.0, BigTIFF) -----------------------------------------------------------------------------------

_TIFF_XMP = 700
_TIFF_PICTURE = {
    *(256, 257, 258, 259, 262, 266, 273, 277, 278, 279, 284),  # size, samples, compression, strips
    *(292, 293, 317, 320, 322, 323, 324, 325, 332, 338, 339, 347),  # fax, predictor, colours, tiles, JPEG tables
    *(512, 513, 514, 515, 517, 518, 519, 520, 521, 529, 530, 531, 532),  # JPEG of old, YCbCr
}


def _tiff(data: bytes) -> Container:
    directory = read_directory(data)
    if directory is None:
        raise InvalidImage("the TIFF file's first directory cannot be read")
    fields = {field.tag: field for field in reversed(directory.fields) if field.tag in _TIFF_PICTURE}
    if sum(field.value_size * field.number for field in fields.values()) > len(data):
        raise InvalidImage("the TIFF file's directory claims more data than the file has")
    if any(field.value_size > 1 and field.number > _MAX_VALUES for field in fields.values()):
        raise InvalidImage(f"the TIFF file has more than {_MAX_VALUES} strips, tiles or colours")
    stated = directory_orientation(directory)
    if stated is None:
        xmp = directory.find(_TIFF_XMP)
        stated = orientation(None, directory.value(xmp, data) if xmp else None)

    # A directory of the picture's own fields takes the place of the first, which it fits, and is the last: metadata
    # and other pictures cannot be reached from it.
    view = memoryview(data)
    count = struct.pack(directory.order + ("Q" if directory.big else "H"), len(fields))
    entries = b"".join(fields[tag].entry for tag in sorted(fields))
    last = bytes(8 if directory.big else 4)
    end = directory.offset + len(count) + len(entries) + len(last)
    rewritten = b"".join((view[: directory.offset], count, entries, last, view[end:]))
    return Container("TIFF", rewritten, orientation=stated)


# --- the others -----------------------------------------------------------------------------------------------------


def _webp(data: bytes) -> Container:
    """Reads the size as the WebP container specification has it; libwebp allocates the canvas when it opens it."""
    kind, head = data[12:16], data[20:30]
    size = None
    if kind == b"VP8X" and len(head) == 10:
        size = int.from_bytes(head[4:7], "little") + 1, int.from_bytes(head[7:10], "little") + 1
    elif kind == b"VP8L" and head[:1] == b"\x2f" and len(head) >= 5:
        bits = int.from_bytes(head[1:5], "little")
        size = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 " and head[3:6] == b"\x9d\x01\x2a" and len(head) == 10:
        size = int.from_bytes(head[6:8], "little") & 0x3FFF, int.from_bytes(head[8:10], "little") & 0x3FFF
    if size is None:
        raise InvalidImage("the WebP header is cut off or corrupt")
    return Container("WEBP", data, size=size)


def _bmp(data: bytes) -> Container:
    run_length = int.from_bytes(data[30:34], "little") in (1, 2) and data[14:18] != b"\x0c\0\0\0"
    if run_length and len(data) > _MAX_RUN_LENGTH_BYTES:
        raise InvalidImage(f"a run-length encoded BMP of more than {_MAX_RUN_LENGTH_BYTES} bytes is not read")
    return Container("BMP", data, orientation=UPRIGHT)


_AVIF_BRANDS = {b"avif", b"avis"}
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}
_MAX_EXIF_BLOCKS = 8


def _heif_family(data: bytes) -> Container:
    """AVIF and HEIC are one container (ISO/IEC 23008-12); the brands in its first box say which."""
    brands = data[8 : min(int.from_bytes(data[:4], "big"), 256)]
    compatible = {brands[start : start + 4] for start in range(0, len(brands), 4)}
    if compatible & _AVIF_BRANDS:
        _check_boxes(data)
        _check_exif(data)
        return Container("AVIF", data)
    if compatible & _HEIC_BRANDS:
        return Container("HEIF", data, orientation=UPRIGHT)
    raise UnsupportedImageFormat("an ISO media file that is neither AVIF nor HEIC")


def _check_exif(data: bytes) -> None:
    """Pillow copies the values of the Exif block out as it opens an AVIF file: it has to be an honest one."""
    view = memoryview(data)
    blocks = 0
    for header in (b"II*\0", b"MM\0*"):
        start = data.find(header)
        while start >= 0:
            directory = read_directory(view[start:])
            if directory and sum(field.value_size * field.number for field in directory.fields) > len(data):
                raise InvalidImage("the AVIF file's Exif block claims more data than the file has")
            blocks += 1
            if blocks > _MAX_EXIF_BLOCKS:
                raise InvalidImage(f"the AVIF file has more than {_MAX_EXIF_BLOCKS} Exif blocks")
            start = data.find(header, start + 1)


def _check_boxes(data: bytes) -> None:
    """The boxes at the top have to fill the file: libavif does not tell a cut file from one it cannot read."""
    position = 0
    for _ in _parts():
        if position == len(data):
            return
        size = int.from_bytes(data[position : position + 4], "big")
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        if size == 0 and len(data) - position >= 8:  # to the end of the file
            return
        if size < 8 or position + size > len(data):
            raise InvalidImage("the AVIF file is cut off or its boxes are corrupt")
        position += size


_OPENERS: tuple[tuple[re.Pattern[bytes], Callable[[bytes], Container]], ...] = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), _png),
    (re.compile(rb"RIFF.{4}WEBP", re.DOTALL), _webp),
    (re.compile(rb"GIF8[79]a"), _gif),
    (re.compile(rb"II[*+]\0|II\0\*|MM\0[*+]|MM\*\0"), _tiff),
    (re.compile(rb".{4}ftyp", re.DOTALL), _heif_family),
    (re.compile(rb"BM"), _bmp),
)
"""Magic numbers of all but JPEG, the most usual formats first."""
