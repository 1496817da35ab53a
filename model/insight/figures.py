"""Figures of what a Vision Transformer learned, as PNG files.

Figures are drawn with matplotlib (the optional extra `figures`), never with torch, and by the Agg canvas: the global
list of figures in `pyplot` would keep them alive, and its backend would look for a display. Each function that draws
writes a PNG to `path` and raises FigureError where matplotlib is missing or the file cannot be written.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from model.errors import FigureError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI: Final = 110
_TILE_COLUMNS: Final = 7
_MAX_MAPS: Final = 16
"""Positions drawn at most along each axis of the grid; a finer grid is thinned out evenly."""


def available() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def require() -> None:
    """Raise FigureError if matplotlib is missing, before any work is done."""
    if not available():
        raise FigureError("figures need matplotlib: pip install -e '.[figures]' in the clone")


def canvas(width: float, height: float) -> Figure:
    """Return an empty figure of `width` x `height` inches of `DPI` pixels, laid out by the constrained layout."""
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  an optional extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG, and the folder around it if there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the version of matplotlib in it: the same numbers give the same file.
        figure.savefig(path, format="png", metadata={"Software": None})
    except OSError as error:
        raise FigureError(f"{path}: cannot be written: {error.strerror}") from error


def patch_filters(components: NDArray[np.float32], explained: NDArray[np.float32], path: Path) -> None:
    """Draw the first principal components of the patch-embedding filters as tiles, as figure 7 of the ViT paper.

    Args:
        components: [M, C, P, P], C = 1 or 3 (a second and fourth channel are left out).
        explained: [M] share of the filters' variance, 0...1.
    """
    rows = math.ceil(len(components) / _TILE_COLUMNS)
    figure = canvas(0.95 * _TILE_COLUMNS, 1.1 * rows + 0.5)
    tiles = figure.subplots(rows, _TILE_COLUMNS, squeeze=False)
    for axes in tiles.flat:
        axes.axis("off")
    for number, (axes, component) in enumerate(zip(tiles.flat, components, strict=False)):
        # Each on its own scale, as the paper's figure: what counts is the pattern, the sign has no meaning.
        low, high = component.min(), component.max()
        tile = ((component - low) / (high - low if high > low else 1)).transpose(1, 2, 0)
        if tile.shape[2] >= 3:
            axes.imshow(tile[:, :, :3], interpolation="nearest")
        else:
            axes.imshow(tile[:, :, 0], interpolation="nearest", cmap="gray", vmin=0, vmax=1)
        axes.set_title(f"{number + 1}: {explained[number]:.1%}", fontsize=7)
    figure.suptitle(f"Principal components of the patch filters, share of variance ({explained.sum():.1%} in all)")
    save(figure, path)


def position_similarity(similarity: NDArray[np.float32], path: Path) -> None:
    """Draw a small map for each position: the cosine similarity of its embedding to those of all positions.

    Args:
        similarity: [gh, gw, gh, gw], -1...1.
    """
    rows, columns = similarity.shape[:2]
    shown_rows = list(range(0, rows, math.ceil(rows / _MAX_MAPS)))
    shown_columns = list(range(0, columns, math.ceil(columns / _MAX_MAPS)))
    # A single picture of all maps with a gap between them: a grid of axes would take seconds to draw.
    high, wide = len(shown_rows) * (rows + 1) - 1, len(shown_columns) * (columns + 1) - 1
    mosaic = np.full((high, wide), np.nan, dtype=np.float32)
    for i, row in enumerate(shown_rows):
        for j, column in enumerate(shown_columns):
            top, left = i * (rows + 1), j * (columns + 1)
            mosaic[top : top + rows, left : left + columns] = similarity[row, column]
    scale = 7.5 / max(high, wide)
    figure = canvas(max(3.0, wide * scale) + 1.3, max(3.0, high * scale) + 0.6)
    axes = figure.subplots()
    picture = axes.imshow(mosaic, cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
    axes.set_xticks(
        [j * (columns + 1) + (columns - 1) / 2 for j in range(len(shown_columns))], list(map(str, shown_columns))
    )
    axes.set_yticks([i * (rows + 1) + (rows - 1) / 2 for i in range(len(shown_rows))], list(map(str, shown_rows)))
    axes.tick_params(length=0, labelsize=7)
    axes.set(xlabel="patch column", ylabel="patch row", title="Position embedding similarity")
    figure.colorbar(picture, ax=axes, label="cosine similarity", shrink=0.8)
    save(figure, path)


def attention_distance(distance: NDArray[np.float64], path: Path, *, even: float) -> None:
    """Draw the mean attention distance: a dot a head over its layer, a line through the layers' means.

    Args:
        distance: [layers, heads] in input pixels.
        even: the distance if attention were spread evenly over all patches, for comparison.
    """
    layers, heads = distance.shape
    figure = canvas(6.4, 4.2)
    axes = figure.subplots()
    for head in range(heads):
        axes.plot(range(layers), distance[:, head], "o", color=f"C{head % 10}", markersize=5, alpha=0.8)
    axes.plot(range(layers), distance.mean(axis=1), "-", color="tab:gray", linewidth=1, label="mean over heads")
    axes.axhline(even, color="tab:gray", linestyle=":", linewidth=1, label="spread evenly")
    axes.set(xlabel="layer", ylabel="mean attention distance in pixels", title=f"{heads} heads a layer")
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)
