"""Figures of what a Vision Transformer learned, as PNG files.

Figures are drawn with matplotlib (the optional extra `figures`), never with torch, and by the Agg canvas: the global
list of figures in `pyplot` would keep them alive, and its backend would look for a display. Each function that draws
writes a PNG to `path` and raises FigureError where matplotlib is missing or the file cannot be written.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from model.errors import FigureError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require() -> None:
    """Raise FigureError if matplotlib is missing, before any work is done."""
    if find_spec("matplotlib") is None:
        raise FigureError("figures need matplotlib: pip install 'vitserve[figures]'")


def _canvas() -> Figure:
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  an optional extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7.0, 5.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    try:
        # Without the version of matplotlib in it: the same numbers give the same file.
        figure.savefig(path, format="png", metadata={"Software": None})
    except OSError as error:
        raise FigureError(f"{path}: cannot be written: {error.strerror}") from error


def attention_distance(distance: NDArray[np.float64], path: Path, *, even: float) -> None:
    """Draw the mean attention distance: a dot a head over its layer, a line through the layers' means.

    Args:
        distance: [layers, heads] in input pixels.
        even: the distance if attention were spread evenly over all patches, for comparison.
    """
    layers, heads = distance.shape
    figure = _canvas()
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
    _save(figure, path)
