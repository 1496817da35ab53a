"""Conversion of any Pillow mode to RGB or greyscale, a piece of the picture at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from PIL import Image

Converter = Callable[[Image.Image], Image.Image]

_GREY = ("1", "L", "LA", "La")
_ROUTES: dict[str, tuple[str, ...]] = {"La": ("LA",), "LAB": ("RGB",)}
"""Modes that Pillow converts to grey or RGB only by way of others."""

_PIECE_PIXELS = 1_000_000
"""Pixels looked at together when a picture's range is measured."""


def converter(image: Image.Image, mode: Literal["RGB", "L"]) -> Converter | None:
    """Return what converts any piece of `image` as `convert(mode)` would the whole; None if nothing is to convert.

    Alpha is dropped, not blended, and ICC profiles are ignored. Two modes Pillow would clip are scaled:

    * 16-bit grey (I;16, I;16B, I;16L, I;16N) to its high byte, as Pillow reads 16-bit colour.
    * 32-bit integers and floats (I, F), whose range no file format states, from the smallest of 0...1 (F only),
      0...255 and 0...65535 that holds every finite pixel, else from the picture's own minimum to its maximum.
      Pixels that are not finite become black.

    Args:
        image: loaded; its `info` loses the transparent colour, which would only cost time here.
        mode: RGB or L. A grey picture stays L under RGB too: its three channels would be equal, and one is
            resized in a third of the time.
    """
    image.info.pop("transparency", None)
    stored = image.mode
    if stored in (mode, "L"):
        return None
    if stored.startswith("I;16"):
        return _high_byte
    if stored in ("I", "F"):
        return _scaler(*_range(image))
    route = _ROUTES.get(stored, ()) + (("L",) if stored in _GREY else (mode,))

    def convert(piece: Image.Image) -> Image.Image:
        for step in route:
            piece = piece.convert(step)
        return piece

    return convert


def _high_byte(piece: Image.Image) -> Image.Image:
    # Pillow hands 16-bit pixels over in the machine's byte order or names another order in the dtype.
    return Image.fromarray((np.asarray(piece) >> 8).astype(np.uint8))


def _scaler(low: float, high: float) -> Converter:
    """Return the function that maps low...high to 0...255."""
    factor = 255.0 / (high - low) if high > low else 0.0

    def scale(piece: Image.Image) -> Image.Image:
        # Doubles: the span of the numbers may be wider than a 32-bit integer or float can say.
        with np.errstate(invalid="ignore"):  # signalling NaNs
            values = np.asarray(piece).astype(np.float64)
        values[~np.isfinite(values)] = low
        values -= low
        values *= factor
        values += 0.5
        return Image.fromarray(values.clip(0, 255, out=values).astype(np.uint8))

    return scale


def _range(image: Image.Image) -> tuple[float, float]:
    """Return the (lowest, highest) value of the range that the pixels are likely meant to have."""
    low, high = math.inf, -math.inf
    step = max(1, _PIECE_PIXELS // image.width)
    for top in range(0, image.height, step):
        values = np.asarray(image.crop((0, top, image.width, min(top + step, image.height))))
        finite = values[np.isfinite(values)]
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    if low >= 0:
        for nominal in (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0):
            if high <= nominal:
                return 0.0, nominal
    return low, high
