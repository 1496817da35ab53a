"""PNG (W3C PNG, third edition, section 5): its header, its chunks without metadata."""

import zlib
from typing import Final

from model.errors import InvalidImage
from model.images.formats import MAX_PARTS, MAX_XMP, read_orientation

_PICTURE_CHUNKS = {b"IHDR", b"PLTE", b"IDAT", b"IEND"}
_MAX_BOUNDED_FILE = 8_388_608
# Common writers end a chunk every 8 KiB or later. A thread would count more chunks in Python, which
# stops the event loop.
_MAX_BOUNDED_CHUNKS = 1024
# Bytes of all samples: about 0.1 s of deflate's fastest data and of Paeth's filter.
_MAX_BOUNDED_BYTES = 16_777_216

# Keyword of the iTXt chunk with XMP (XMP specification, part 3).
_XMP: Final = b"XML:com.adobe.xmp\0"

# Keyword of the text chunk with Exif that ImageMagick and exiv2 write: three lines, then its bytes
# in hexadecimal digits.
_RAW_EXIF: Final = b"Raw profile type exif\0"
_MAX_RAW_EXIF: Final = 262_144

# Samples per pixel, by colour type.
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def is_bounded(data: bytes | bytearray) -> bool:
    """Return whether header and chunks bound the work: moderate size, and not many chunks."""
    width = int.from_bytes(data[16:20], "big")
    height = int.from_bytes(data[20:24], "big")
    bits = int.from_bytes(data[24:25], "big")
    colour_type = int.from_bytes(data[25:26], "big")
    pixel_bytes = max(1.0, bits * _CHANNELS.get(colour_type, 4) / 8)
    return (
        data[12:16] == b"IHDR"
        and len(data) <= _MAX_BOUNDED_FILE
        and width * height * pixel_bytes <= _MAX_BOUNDED_BYTES
        and not _has_many_chunks(data)
    )


def _has_many_chunks(data: bytes | bytearray) -> bool:
    position = 8
    for _ in range(_MAX_BOUNDED_CHUNKS):
        position += 12 + int.from_bytes(data[position : position + 4], "big")
        if position >= len(data):
            return False
    return True


def strip(data: bytes | bytearray) -> tuple[bytes, int]:
    """Return the file without ancillary chunks, and the orientation from them.

    IDAT chunks after the first run of IDAT chunks are dropped too.

    Raises:
        InvalidImage: a wrong checksum of the pixels, a second header, or too many chunks.
    """
    view = memoryview(data)
    kept = [view[:8]]
    exif = None
    raw_exif = None
    xmp = None
    position = 8
    previous = b""
    pixels_ended = False
    for _ in range(MAX_PARTS):
        body = position + 8
        kind = bytes(view[position + 4 : body])
        end = body + 4 + int.from_bytes(view[position : position + 4], "big")
        pixels_ended = pixels_ended or (previous == b"IDAT" and kind != b"IDAT")
        # Pillow would use the last header, which may declare another size than the first.
        if kind == b"IHDR" and position > 8:
            raise InvalidImage("the PNG picture does not decode: its header is not its first chunk")
        if kind == b"IDAT" and end <= len(data):
            checksum = int.from_bytes(view[end - 4 : end], "big")
            if zlib.crc32(view[body - 4 : end - 4]) != checksum:
                raise InvalidImage(
                    "the PNG picture does not decode: the checksum of its pixels is wrong"
                )
        is_part = kind in _PICTURE_CHUNKS or len(kind) < 4
        if is_part and not (kind == b"IDAT" and pixels_ended):
            kept.append(view[position:end])
        elif kind == b"eXIf":
            exif = bytes(view[body : end - 4])
        elif kind == b"iTXt" and data.startswith(_XMP, body):
            xmp = view[body + len(_XMP) : end - 4]
        elif kind in (b"tEXt", b"zTXt") and data.startswith(_RAW_EXIF, body):
            raw_exif = _raw_exif(view[body + len(_RAW_EXIF) : end - 4], kind == b"zTXt")
        position = end
        previous = kind
        if kind == b"IEND" or position >= len(data):
            return b"".join(kept), read_orientation(exif or raw_exif, _packet(xmp))
    raise InvalidImage(f"the file is made of more than {MAX_PARTS} parts")


def _packet(chunk: memoryview | None) -> bytes | None:
    """Return the beginning of the XMP in an iTXt chunk, after its keyword; None if damaged."""
    if chunk is None:
        return None
    content = bytes(chunk[:MAX_XMP])
    # The language and the translated keyword come before the text.
    text = content[2:].split(b"\0", 2)[-1]
    if not content.startswith(b"\1"):
        return text
    try:
        return zlib.decompressobj().decompress(text, MAX_XMP)
    except zlib.error:
        return None


def _raw_exif(chunk: memoryview, is_compressed: bool) -> bytes | None:
    """Return the Exif in a text chunk, after its keyword; None if damaged."""
    text = bytes(chunk[:_MAX_RAW_EXIF])
    try:
        if is_compressed:  # the first byte is the method
            text = zlib.decompressobj().decompress(text[1:], _MAX_RAW_EXIF)
        digits = b"".join(text.split(b"\n")[3:])
        return bytes.fromhex(digits.decode("ascii"))
    except (zlib.error, ValueError):
        return None
