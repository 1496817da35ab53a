"""A picture, in whatever form a program holds it, as the bytes of a file."""

from __future__ import annotations

import io
import os
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
_ARRAY_MODES = {(): "L", (1,): "L", (3,): "RGB", (4,): "RGBA"}
"""By the axes after rows and columns."""

_EXPECTED = (
    "expected a path, bytes, a file open for binary reading, a PIL image, "
    "or a uint8 array [rows, columns] or [rows, columns, 1, 3 or 4]"
)


def file_bytes(image: ImageSource) -> bytes:
    """Return the bytes of an image file: PIL images and arrays are encoded as PNG, everything else is a file already.

    Neither PIL nor numpy is imported for the others; their objects are recognised by what they can do.

    Raises:
        OSError: the file cannot be read.
        TypeError: this is no picture.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | os.PathLike):
        return Path(image).read_bytes()
    if hasattr(image, "getexif"):
        return _png(cast("Image.Image", image))
    if hasattr(image, "read") and not isinstance(image, io.TextIOBase):
        return image.read()
    try:
        pixels = memoryview(image)  # type: ignore[arg-type]  # numpy's stubs do not say that its arrays are buffers
    except (TypeError, ValueError):
        raise TypeError(f"{_EXPECTED}, not {type(image).__name__}") from None
    shape = pixels.shape or ()
    if pixels.format == "B" and len(shape) == 1:
        return pixels.tobytes()  # the bytes of a file
    if pixels.format != "B" or len(shape) < 2 or shape[2:] not in _ARRAY_MODES:
        raise TypeError(f"{_EXPECTED}, not {getattr(image, 'dtype', 'an array')} {list(shape)}")
    from PIL import Image  # noqa: PLC0415  programs that send files start quicker

    return _png(Image.frombytes(_ARRAY_MODES[shape[2:]], (shape[1], shape[0]), pixels.tobytes()))


def _png(image: Image.Image) -> bytes:
    """Return a PNG that lies as the file did from which the image was opened."""
    file, exif = io.BytesIO(), image.getexif()
    orientation = type(exif)()  # without where and when the photo was taken
    orientation[_ORIENTATION] = exif.get(_ORIENTATION, 1)
    if image.mode not in _PNG_MODES:
        image = image.convert("RGB")
    image.save(file, "PNG", exif=orientation, compress_level=1)
    return file.getvalue()
