"""Convert a decoded picture to RGB or grey, one piece of the picture at a time."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from PIL import Image

# Converts a piece of one picture.
Converter = Callable[[Image.Image], Image.Image]

_GREY = ("1", "L", "LA", "La")
# Modes that Pillow converts to grey or RGB only through other modes.
_ROUTES: dict[str, tuple[str, ...]] = {"La": ("LA",), "LAB": ("RGB",)}


def converter(image: Image.Image, mode: Literal["RGB", "L"]) -> Converter | None:
    """Return the function that converts any piece of `image` like `convert(mode)` on the whole.

    Return None if the image needs no conversion. Alpha is dropped, not blended, and ICC profiles
    are ignored. Two kinds of modes are scaled, because Pillow would clip them:

    * 16-bit grey (I;16, I;16B, I;16L, I;16N) is scaled to its high byte, like Pillow's 16-bit
      colour.
    * File formats do not state the range of 32-bit integers and floats (I, F). They are scaled from
      the smallest of 0...1 (F only), 0...255 and 0...65535 that holds every pixel. Other pictures
      are scaled from their own minimum to their maximum. A pixel that is not finite raises
      ValueError.

    Args:
        image: loaded. The transparent colour is removed from its `info`, because it only costs time
            here.
        mode: RGB or L. A grey picture stays L under RGB too: its three channels would be equal, and
            one channel is resized in a third of the time.
    """
    image.info.pop("transparency", None)
    stored = image.mode
    if stored in (mode, "L"):
        return None
    if stored.startswith("I;16"):
        # Pillow passes 16-bit pixels on in the machine's byte order, or names the order in the
        # dtype.
        return lambda piece: Image.fromarray((np.asarray(piece) >> 8).astype(np.uint8))
    if stored in ("I", "F"):
        return _scaler(image)
    route = _ROUTES.get(stored, ()) + (("L",) if stored in _GREY else (mode,))

    def convert(piece: Image.Image) -> Image.Image:
        for step in route:
            piece = piece.convert(step)
        return piece

    return convert


def _scaler(image: Image.Image) -> Converter:
    """Return the function that scales the likely range of the pixels to 0...255."""
    extrema: Any = image.getextrema()
    low, high = map(float, extrema)
    limits = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
    limit = next((limit for limit in limits if low >= 0 and high <= limit), None)
    if limit is not None:
        low = 0.0
        high = limit
    factor = 255.0 / (high - low) if high > low else 0.0

    def scale(piece: Image.Image) -> Image.Image:
        # The span of the values may exceed 32-bit integers and floats, but not doubles.
        values = np.asarray(piece).astype(np.float64)
        if not np.isfinite([low, high, values.min(), values.max()]).all():
            raise ValueError("some pixels are not finite")
        values -= low
        values *= factor
        values += 0.5
        return Image.fromarray(values.clip(0, 255, out=values).astype(np.uint8))

    return scale
