"""Colour tables for heat maps, and the bar that shows which colour means how much.

The tables have matplotlib's names and colours. `colormaps.png` holds one table a row, in the order of `COLORMAPS`. They
were generated once with matplotlib 3.11.2 as `colormaps[name](range(256), bytes=True)[:, :3]`, so that serving needs no
plotting library. Where they come from:

* viridis, plasma, inferno, magma: Nathaniel J. Smith, Stefan van der Walt and Eric Firing, 2015, CC0
  (https://bids.github.io/colormap/). Perceptually uniform.
* cividis: Nunez, Anderton and Renslow, 2018 (https://doi.org/10.1371/journal.pone.0199239). Looks alike to readers
  with and without colour blindness.
* turbo: Anton Mikhailov, Google, 2019, Apache-2.0.
* jet, hot, bone, gray: piecewise linear functions of old, as matplotlib computes them.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from model.errors import InputError

COLORMAPS = ("viridis", "plasma", "inferno", "magma", "cividis", "turbo", "jet", "hot", "bone", "gray")

_MIN_HEIGHT = 96
"""Pixels: below it, the scale cannot be read."""

_TITLE = "times even share"


@cache
def colour_table(name: str) -> NDArray[np.uint8]:
    """Return the colours of a map, lowest value first: uint8 [256, 3] RGB, read-only.

    Raises:
        InputError: `name` is not one of `COLORMAPS`.
    """
    if name not in COLORMAPS:
        raise InputError("colormap", f"colormap {name!r} is not offered; one of: {', '.join(COLORMAPS)}")
    with Image.open(Path(__file__).with_name("colormaps.png")) as tables:
        table: NDArray[np.uint8] = np.asarray(tables)[COLORMAPS.index(name)]
    return table


def with_colorbar(drawing: Image.Image, colours: NDArray[np.uint8], full_scale: float) -> Image.Image:
    """Return a drawing with a colour bar and its scale on white at its right.

    The scale is logarithmic: it begins at the even share, 1, and ends at `full_scale` times that.

    Args:
        colours: uint8 [256, 3], lowest value first.
    """
    height = max(drawing.height, _MIN_HEIGHT)
    text = min(32, max(10, height // 28))
    font = ImageFont.load_default(text)
    margin, bar = text, round(1.5 * text)
    width = 2 * margin + round(max(font.getlength(_TITLE), bar + 4 * text))
    canvas = Image.new("RGB", (drawing.width + width, height), "white")
    canvas.paste(drawing, (0, 0))

    left, top, bottom = drawing.width + margin, 3 * text, height - text
    levels = np.linspace(255, 0, bottom - top).round().astype(np.intp)
    canvas.paste(Image.fromarray(colours[levels][:, np.newaxis].repeat(bar, axis=1)), (left, top))
    pen = ImageDraw.Draw(canvas)
    pen.text((left, text), _TITLE, "black", font, anchor="lt")
    for ratio in tick_ratios(full_scale, most=(bottom - top) // (2 * text)):
        y = bottom - 1 - round((bottom - top - 1) * math.log(ratio) / math.log(full_scale))
        pen.line((left + bar, y, left + bar + text // 3, y), "black")
        pen.text((left + bar + text // 2, y), f"{ratio:.3g}", "black", font, anchor="lm")
    return canvas


def tick_ratios(full_scale: float, most: int) -> list[float]:
    """Return the ratios that the scale names: both ends and, if `most` is enough for them, powers of 2 between."""
    powers = [2.0**power for power in range(1, math.ceil(math.log2(full_scale)))]
    # A power close to the end of the scale would overlap its label.
    powers = [ratio for ratio in powers if ratio < full_scale / 1.4]
    room = max(0, most - 2)
    step = math.ceil(len(powers) / room) if room else len(powers) + 1
    return [1.0, *powers[max(1, step) - 1 :: max(1, step)], full_scale]
