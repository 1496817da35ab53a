"""Where in the upright photo the model's input lies."""

from __future__ import annotations

from typing import NamedTuple


class Region(NamedTuple):
    """The rectangle of the upright original that the model's input, and so every map, covers.

    In pixels of the original, with fractions; (`x`, `y`) is its upper left corner. It lies within the photo.
    """

    x: float
    y: float
    width: float
    height: float
