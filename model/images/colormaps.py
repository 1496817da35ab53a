"""Colour tables for heat maps, under matplotlib's names and with matplotlib's colours.

`colormaps.png` holds one a row, in the order of `COLORMAPS`. They were generated once with matplotlib 3.11.2 as
`colormaps[name](range(256), bytes=True)[:, :3]`, so that serving needs no plotting library. Where they come from:

* viridis, plasma, inferno, magma: Nathaniel J. Smith, Stefan van der Walt and Eric Firing, 2015, CC0
  (https://bids.github.io/colormap/). Perceptually uniform.
* cividis: Nunez, Anderton and Renslow, 2018 (https://doi.org/10.1371/journal.pone.0199239). Looks alike to readers
  with and without colour blindness.
* turbo: Anton Mikhailov, Google, 2019, Apache-2.0.
* jet, hot, bone, gray: piecewise linear functions of old, as matplotlib computes them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.errors import InputError

COLORMAPS = ("viridis", "plasma", "inferno", "magma", "cividis", "turbo", "jet", "hot", "bone", "gray")


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
