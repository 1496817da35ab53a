"""Enlargement of a map over a grid to pixels, by numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def nearest(values: Array, at: Array) -> Array:
    """Return the value of the cell that each position lies in.

    Args:
        values: [cells, ...], one row for each cell.
        at: [positions], in cells: cell i reaches from i to i + 1.

    Returns:
        [positions, ...]; positions outside the grid get the cell at its edge.
    """
    found: Array = values[np.floor(at).astype(np.intp).clip(0, len(values) - 1)]
    return found


def monotone_cubic(values: Array, at: Array) -> Array:
    """Return a smooth curve through the middles of the cells, at each position.

    The curve is that of Fritsch and Butland (1984), known as PCHIP: between two neighbours it lies between their
    values, so that it never overshoots, as a bicubic one does beside a steep edge.

    Arguments and result are those of `nearest`; beyond the first and the last middle the curve is level.
    """
    cells = len(values)
    if cells == 1:
        return nearest(values, at)
    steps = np.diff(values, axis=0)
    before, after = steps[:-1], steps[1:]
    slopes = np.zeros_like(values)
    # The harmonic mean, at extrema zero. Squares of the smallest floats vanish, and their slopes with them.
    product = before * after
    np.divide(2 * product, before + after, out=slopes[1:-1], where=product > 0)
    start, end = slopes[:-1], slopes[1:]
    left = np.floor(at - 0.5).astype(np.intp).clip(0, cells - 2)
    t = (at - 0.5 - left).clip(0, 1).astype(np.float32).reshape(-1, *(1,) * (values.ndim - 1))
    # Horner's scheme, in place: a large drawing has millions of positions.
    curve: Array = (start + end - 2 * steps)[left]
    for coefficient in (3 * steps - 2 * start - end, start, values[:-1]):
        curve *= t
        curve += coefficient[left]
    return curve
