"""Make thumbnails of pictures as a model sees them."""

import io
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MAX_BYTES: Final = 4096
"""Most bytes of a thumbnail. A thumbnail of noise has a low quality."""

_SIDE: Final = 64
_QUALITIES: Final = (75, 50, 25, 5)


def jpeg_thumbnail(pixels: NDArray[np.uint8]) -> bytes:
    """Return a JPEG thumbnail, at most 64 pixels wide and high and `MAX_BYTES` large.

    Args:
        pixels: uint8 [H, W, C].
    """
    if pixels.shape[2] != 3:
        pixels = np.repeat(pixels[:, :, :1], 3, axis=2)
    picture = Image.fromarray(pixels)
    picture.thumbnail((_SIDE, _SIDE))
    content = b""
    for quality in _QUALITIES:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=quality)
        content = file.getvalue()
        if len(content) <= MAX_BYTES:
            break
    return content
