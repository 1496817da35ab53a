"""Heat maps: a map of where the model looked, in colour over a picture. PIL and numpy, never torch.

The colour tables have matplotlib's names and colours. Each row of `colormaps.png` is a table, in the order of
`COLORMAPS`. They were generated once with matplotlib 3.11.2 as `colormaps[name](range(256), bytes=True)[:, :3]`, so
that serving needs no plotting library. Where they come from:

* viridis, plasma, inferno, magma: Nathaniel J. Smith, Stefan van der Walt and Eric Firing, 2015, CC0
  (https://bids.github.io/colormap/). Perceptually uniform.
* cividis: Nunez, Anderton and Renslow, 2018 (https://doi.org/10.1371/journal.pone.0199239). Looks alike to readers
  with and without colour blindness.
* turbo: Anton Mikhailov, Google, 2019, Apache-2.0.
* jet, hot, bone, gray: piecewise linear functions of old, as matplotlib computes them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.errors import InputError
from model.images.legend import caption_height, with_caption, with_colorbar
from model.images.region import Region

COLORMAPS = ("viridis", "plasma", "inferno", "magma", "cividis", "turbo", "jet", "hot", "bone", "gray")

MAX_SIZE = 2048
"""Longest side of a heat map in pixels."""

_SMALL_INPUT = 128
"""Longer side in pixels of an input from which on it shows what is there; of a smaller one, the photo shows more."""

_MIN_DEFAULT_SIZE = 384
"""Longer side in pixels, at least, where no size is given: patches stay visible on small pictures."""

_MIN_FULL_SCALE = 4.0
"""Times the even share, at least, that the last colour stands for: a map with less in it stays pale."""

_DIMMED = 0.35
"""Brightness of the part of a photo that the model did not see."""

_STRIP_ROWS = 256
"""Rows drawn at a time."""

_COMPRESS_LEVEL = 4
"""A level of zlib, 1...9: overlays get no smaller beyond it, only slower (6 takes three times as long)."""

Array = NDArray[np.float32]


class Look(TypedDict, total=False):
    """Arguments of `draw_heatmap` that a caller may choose freely."""

    colormap: str
    alpha: float
    size: int | None
    smooth: bool
    colorbar: bool


def default_view(image_size: tuple[int, int]) -> Literal["input", "photo"]:
    """Return what the maps of a model of this input size are drawn over by default, where there is a photo."""
    return "photo" if max(image_size) < _SMALL_INPUT else "input"


def draw_heatmap(
    values: NDArray[np.float32],
    *,
    picture: NDArray[np.uint8] | None,
    region: Region | None = None,
    colormap: str = "turbo",
    alpha: float = 0.7,
    size: int | None = None,
    smooth: bool = True,
    colorbar: bool = False,
    caption: Sequence[str] = (),
    scale: float | None = None,
    max_width: int = MAX_SIZE,
) -> Image.Image:
    """Return a map drawn over a picture.

    With r a patch's share over the even share, 1 / (rows * columns), the colour is that at log(r) / log(scale) of the
    table, and the map's opacity is `alpha` times the same number. Patches with the even share or less leave the picture
    as it is, so that an even map changes nothing.

    Args:
        values: float [grid rows, grid columns]; only ratios count. What is negative or not finite counts as 0.
        picture: uint8 [H, W, 3], or [H, W, 1] for grey, drawn under the map. None: the map alone, each patch as
            high as wide.
        region: the part of `picture` that the map covers, in its pixels; the rest is dimmed. None: the whole.
        alpha: 0...1, how much the last colour covers the picture.
        size: longer side of the result in pixels, at most `MAX_SIZE`; None: that of the picture in it is the picture's
            own, or 384 if that is more.
        smooth: run from patch to patch without steps, and never beyond the values of neighbours; otherwise each patch
            is one square.
        colorbar: add a colour bar with its scale at the right, which makes the result wider than `size` says.
        caption: lines to write below, with the colours in words where they are drawn; a small drawing has no room.
        scale: how many times the even share the last colour stands for; None: `full_scale` of the map.
        max_width: pixels of the picture in the result at most.

    Returns:
        An RGB image; without caption and colour bar, it has the picture's aspect ratio.

    Raises:
        InputError: `colormap`, `alpha` or `size` is outside what is offered.
    """
    if not 0.0 <= alpha <= 1.0:  # also refuses NaN
        raise InputError("alpha", f"alpha {alpha} is not between 0 and 1")
    if size is not None and not 1 <= size <= MAX_SIZE:
        raise InputError("size", f"size {size} is not between 1 and {MAX_SIZE}")
    colours = colour_table(colormap)

    grid_rows, grid_columns = values.shape
    rows, columns = values.shape if picture is None else picture.shape[:2]
    longer = min(max(rows, columns, _MIN_DEFAULT_SIZE), MAX_SIZE) if size is None else size
    longer = max(1, min(longer, round(max_width * max(rows, columns) / columns)))
    below = caption_height(longer) if caption else 0
    highest = (MAX_SIZE if size is None else longer) - below
    enlarged = min(longer / max(rows, columns), highest / rows)
    width, height = (max(1, round(side * enlarged)) for side in (columns, rows))
    if region is None:
        region = Region(0.0, 0.0, columns, rows)
    down = _cells(height, rows, region.y, region.height, grid_rows)
    across = _cells(width, columns, region.x, region.width, grid_columns)
    seen = ((down >= 0) & (down <= grid_rows))[:, np.newaxis] & ((across >= 0) & (across <= grid_columns))

    ratios = _ratios(values)
    scale = full_scale(values) if scale is None else scale
    levels = (np.log(ratios.clip(1.0, scale)) / np.log(scale)).astype(np.float32)
    enlarge = monotone_cubic if smooth else nearest
    by_column = enlarge(levels, down).T.copy()  # [grid columns, height]
    under = None if picture is None else _enlarged(picture, (width, height))
    opacities = np.rint(alpha * np.arange(256)).astype(np.uint8)
    drawing = Image.new("RGB", (width, height))
    for top in range(0, height, _STRIP_ROWS):
        rows_here = slice(top, top + _STRIP_ROWS)
        index = np.rint(255 * enlarge(by_column[:, rows_here], across).T).astype(np.uint8)  # [strip's rows, width]
        strip = Image.fromarray(colours[index])
        if under is not None:
            photo = _dimmed(under.crop((0, top, width, top + len(index))), seen[rows_here])
            strip = Image.composite(strip, photo, Image.fromarray(opacities[index] * seen[rows_here]))
        drawing.paste(strip, (0, top))
    if below:
        peak = float(ratios.max()) if alpha or picture is None else None
        drawing = with_caption(drawing, caption, colours, peak, longer=longer)
    return with_colorbar(drawing, colours, scale) if colorbar else drawing


def full_scale(values: NDArray[np.float32], evidence: float | None = None) -> float:
    """Return how many times the even share the last colour of a map's drawing stands for: its highest patch's, or 4.

    A map that is faded has the scale that it would have with the whole evidence, so that it looks faded.

    Args:
        values: see `draw_heatmap`.
        evidence: of a class-specific map, 0 ... 1; see `AttentionMap`.
    """
    peak = float(_ratios(values).max())
    if evidence:
        peak = min(1 + (peak - 1) / evidence, values.size)
    return max(_MIN_FULL_SCALE, peak)


def encode_png(drawing: Image.Image) -> bytes:
    """Return a drawing as a PNG."""
    encoded = io.BytesIO()
    drawing.save(encoded, "PNG", compress_level=_COMPRESS_LEVEL)
    return encoded.getvalue()


def nearest(values: Array, at: Array) -> Array:
    """Return the value of the cell that each position lies in.

    Args:
        values: [cells, ...], one row for each cell.
        at: [positions], in cells: cell i reaches from i to i + 1.

    Returns:
        [positions, ...]; positions outside the grid get the cell at its edge.
    """
    nearest_values: Array = values[np.floor(at).astype(np.intp).clip(0, len(values) - 1)]
    return nearest_values


def monotone_cubic(values: Array, at: Array) -> Array:
    """Return a smooth curve through the middles of the cells, at each position.

    The curve is that of Fritsch and Butland (1984), known as PCHIP: between two neighbours it lies between their
    values, so that it never overshoots, as a bicubic curve does beside a steep edge.

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


def _enlarged(picture: NDArray[np.uint8], size: tuple[int, int]) -> Image.Image:
    """Return a picture of one or three channels as an RGB image of this (width, height)."""
    image = Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture).convert("RGB")
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def _dimmed(strip: Image.Image, seen: NDArray[np.bool_]) -> Image.Image:
    """Return a part of a photo, darker where `seen`, bool of its shape, is False."""
    if seen.all():
        return strip
    dark = (np.asarray(strip) * np.float32(_DIMMED)).astype(np.uint8)
    return Image.composite(strip, Image.fromarray(dark), Image.fromarray(seen))


def _cells(pixels: int, source: int, start: float, length: float, cells: int) -> NDArray[np.float32]:
    """Return where the middle of each pixel of one axis lies, in cells of the grid, float32 [pixels].

    Args:
        pixels: of the drawing, which shows `source` pixels of the picture.
        start, length: the part of those that the `cells` cover.
    """
    positions: NDArray[np.float32] = (((np.arange(pixels) + 0.5) * source / pixels - start) * cells / length).astype(
        np.float32
    )
    return positions


def _ratios(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return how many times the even share each patch has."""
    # In double: the sum of a float32 map may exceed float32.
    shares = values.astype(np.float64)
    shares[~np.isfinite(shares) | (shares < 0)] = 0.0
    mean = shares.mean()
    # Below the smallest normal number, a quotient is no longer good for a picture.
    return shares / mean if mean > np.finfo(np.float64).tiny else np.ones_like(shares)


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
