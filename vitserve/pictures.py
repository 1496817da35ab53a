"""A picture, in whatever form a program holds it, as the bytes of a file."""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

ImageSource: TypeAlias = "str | Path | bytes | IO[bytes] | Image.Image | NDArray[np.uint8]"
"""A path, the bytes of a file, a file open for binary reading, a PIL image, or a uint8 array: [rows, columns] is grey,
[rows, columns, 3] is RGB and [rows, columns, 4] is RGBA."""

_ORIENTATION = 0x0112
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
_PNG_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
"""By the number of channels."""

_EXPECTED = (
    "expected a path, bytes, a file open for binary reading, a PIL image, "
    "or a uint8 array [rows, columns] or [rows, columns, 1, 3 or 4]"
)


def file_bytes(image: ImageSource) -> bytes:
    """Return the bytes of an image file: PIL images and arrays are encoded as PNG, everything else is a file already.

    Neither PIL nor numpy is imported; their objects are recognised by what they can do.

    Raises:
        OSError: the file cannot be read.
        TypeError: this is no picture.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | os.PathLike):
        return Path(image).read_bytes()
    if hasattr(image, "getexif"):
        return _encode_pil(cast("Image.Image", image))
    if hasattr(image, "read") and not isinstance(image, io.TextIOBase):
        return image.read()
    try:
        pixels = memoryview(image)  # type: ignore[arg-type]  # numpy's stubs do not say that its arrays are buffers
    except (TypeError, ValueError):
        raise TypeError(f"{_EXPECTED}, not {type(image).__name__}") from None
    match pixels.format, pixels.shape:
        case "B", (_,):  # the bytes of a file
            return pixels.tobytes()
        case "B", (rows, columns, *channels) if channels in ([], [1], [3], [4]):
            return _encode_png(pixels.tobytes(), rows, columns, *channels)
    raise TypeError(f"{_EXPECTED}, not {getattr(image, 'dtype', 'an array')} {list(pixels.shape or ())}")


def _encode_pil(image: Image.Image) -> bytes:
    """Return a PNG that lies as the file did from which the image was opened."""
    file, exif = io.BytesIO(), image.getexif()
    orientation = type(exif)()  # without where and when the photo was taken
    orientation[_ORIENTATION] = exif.get(_ORIENTATION, 1)
    if image.mode not in _PNG_MODES:
        image = image.convert("RGB")
    image.save(file, "PNG", exif=orientation, compress_level=1)
    return file.getvalue()


def _encode_png(pixels: bytes, rows: int, columns: int, channels: int = 1) -> bytes:
    """Return a PNG (W3C PNG, third edition, section 5) of pixels of 8-bit grey, RGB or RGBA."""
    width = columns * channels
    lines = b"".join(b"\0" + pixels[start : start + width] for start in range(0, len(pixels), width or 1))
    head = columns.to_bytes(4, "big") + rows.to_bytes(4, "big") + bytes([8, _PNG_COLOUR_TYPES[channels], 0, 0, 0])
    file = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", head), (b"IDAT", zlib.compress(lines, 1)), (b"IEND", b"")):
        file += len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")
    return file
