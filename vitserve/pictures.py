"""Reads pictures in the forms of Python programs, as the bytes of image files."""

from __future__ import annotations

import errno
import io
import os
import re
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

ImageSource: TypeAlias = "str | Path | bytes | IO[bytes] | Image.Image | NDArray[np.uint8]"
"""A path, the bytes of a file, a file open for binary reading, a PIL image, or a uint8 array.

An array [rows, columns] is grey, [rows, columns, 3] is RGB, and [rows, columns, 4] is RGBA.
"""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

_ORIENTATION_TAG = 0x0112
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
_UNREAD_MODES = ("I;16B", "I;16L", "I;16N", "La")
"""Modes that Pillow converts to RGB by clipping at 255, or not at all."""
_TIFF_MODES = ("F", "I")
"""Modes that the service scales and rounds, and Pillow would clip and truncate."""

_ARRAY_MODES = {(): "L", (1,): "L", (3,): "RGB", (4,): "RGBA"}
"""Modes by an array's axes after rows and columns."""

_EXPECTED = (
    "expected a path, bytes, a file open for binary reading, a PIL image, "
    "or a uint8 array [rows, columns] or [rows, columns, 1, 3 or 4]"
)

_MAX_PATH = 4096
"""Most characters of a path on Linux; a longer text is a picture's content."""

MAX_FILE_BYTES = 1 << 30
"""Most bytes that are read of a file or pipe, which may never end; pictures are smaller."""

_PIECE_BYTES = 1 << 20


def file_bytes(image: ImageSource) -> bytes:
    """Return the bytes of an image file; arrays become PNG, PIL images PNG or TIFF.

    PIL and numpy are recognised by their attributes, because importing them is slow.

    Raises:
        OSError: the file cannot be read, or is too large for a picture.
        TypeError: the object is not a picture.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, str):
        _require_path(image)
    if isinstance(image, str | os.PathLike):
        return read_file(Path(image))
    if hasattr(image, "getexif"):
        return _encoded(cast("Image.Image", image))
    if hasattr(image, "read") and not isinstance(image, io.TextIOBase):
        return _rest(cast("IO[bytes]", image))
    try:
        pixels = memoryview(image)  # type: ignore[arg-type]  # numpy's stubs lack the buffer protocol
    except (TypeError, ValueError):
        raise TypeError(f"{_EXPECTED}, not {type(image).__name__}") from None
    shape = pixels.shape or ()
    if pixels.format == "B" and len(shape) == 1:
        return pixels.tobytes()  # the bytes of a file
    if pixels.format != "B" or len(shape) < 2 or shape[2:] not in _ARRAY_MODES:
        raise TypeError(f"{_EXPECTED}, not {getattr(image, 'dtype', 'an array')} {list(shape)}")
    from PIL import Image  # noqa: PLC0415  slow to import, and few programs need it

    return _encoded(
        Image.frombytes(_ARRAY_MODES[shape[2:]], (shape[1], shape[0]), pixels.tobytes())
    )


def _require_path(text: str) -> None:
    """Raise `FileNotFoundError` for a text that is a picture's URL or content."""
    if not text:
        raise FileNotFoundError("the path of the picture is empty")
    if re.match(r"\w+://", text):
        raise FileNotFoundError(f"{text[:99]}: not a path; pass the path of a local file, or bytes")
    if text[:5].lower() == "data:" or len(text) > _MAX_PATH:
        raise FileNotFoundError(f"{text[:20]}...: not a path; for base64, pass b64decode(text)")


def read_file(path: Path) -> bytes:
    """Return the bytes of a file; raises `OSError` if it cannot be read, or is too large."""
    with path.open("rb", buffering=0) as file:
        return _read(file, path)


def _rest(file: IO[bytes]) -> bytes:
    data = _read(file, getattr(file, "name", None))
    if not data:
        raise ValueError("the file is empty or was read to its end: call its seek(0) first")
    return data


def _read(file: IO[bytes], name: object) -> bytes:
    """Return the bytes from the position of a file to its end, within `MAX_FILE_BYTES`."""
    content = bytearray()
    while piece := file.read(_PIECE_BYTES):
        if not isinstance(piece, bytes | bytearray):
            raise TypeError(f"{_EXPECTED}, not one whose read() returns {type(piece).__name__}")
        content += piece
        if len(content) > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, "more than 1 GiB, or without an end: not a picture", name)
    return bytes(content)


def _encoded(image: Image.Image) -> bytes:
    """Return the image as PNG, or as TIFF if its samples have 32 bits.

    The file has the EXIF orientation and no other metadata.
    """
    if 0 in image.size:
        raise ValueError(f"a picture of size {image.size} has no pixels: check how it was cut out")
    if image.mode in _UNREAD_MODES:
        raise TypeError(f"a PIL image of mode {image.mode}: convert it to L, RGB or I;16 first")
    exif = image.getexif()
    orientation = type(exif)()
    orientation[_ORIENTATION_TAG] = exif.get(_ORIENTATION_TAG, 1)
    file = io.BytesIO()
    if image.mode in _TIFF_MODES:
        image.copy().save(file, "TIFF", exif=orientation, compression="tiff_adobe_deflate")
        return file.getvalue()
    if image.mode not in _PNG_MODES:
        image = image.convert("RGB")
    image.save(file, "PNG", exif=orientation, compress_level=1)
    return file.getvalue()


def require_several(images: object) -> None:
    """Raise `TypeError` if an object is one picture; some pictures are sequences, too."""
    shape = getattr(images, "shape", ())
    if (
        isinstance(images, str | bytes | bytearray | os.PathLike)
        or hasattr(images, "getexif")
        or hasattr(images, "read")
        or len(shape) == 2
        or (len(shape) == 3 and shape[2:] in _ARRAY_MODES)
    ):
        raise TypeError("expected a list of pictures, not one")
