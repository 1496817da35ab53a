"""A picture that is drawn with the coordinates of a browser, in the colours of Grafana's dark theme."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

_BACKGROUND: Final = "#111217"
TEXT, FAINT = "#ccccdc", "#9a9aa8"
FONT: Final = 12


@dataclass(frozen=True)
class Box:
    """A rectangle of the picture in its points, counted from the upper left corner."""

    x: float
    y: float
    width: float
    height: float

    def inner(self, *, left: float = 0, top: float = 0, right: float = 0, bottom: float = 0) -> Box:
        """Return it without its margins."""
        return Box(self.x + left, self.y + top, self.width - left - right, self.height - top - bottom)


class Canvas:
    """The picture, drawn with the coordinates of a browser: points from the upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / 72, height / 72), dpi=72, facecolor=_BACKGROUND)
        self._renderer: RendererBase = FigureCanvasAgg(self.figure).get_renderer()  # type: ignore[no-untyped-call]

    def axes(self, box: Box) -> Axes:
        """Return empty axes that fill a box."""
        axes = self.figure.add_axes(self._position(box))
        axes.set_facecolor("none")
        axes.tick_params(length=0, labelsize=FONT - 2, labelcolor=FAINT, pad=4)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return axes

    def write(self, x: float, y: float, words: str, *, size: float = FONT, width: float = math.inf, **how: Any) -> Text:
        """Return words whose middle is at height `y`, as large as fits into a width."""
        how = {"color": TEXT, "verticalalignment": "center"} | how
        written = self.figure.text(x / self.width, 1 - y / self.height, words, fontsize=size, **how)
        while self.extent(written) > width and size > 6:
            size -= 0.5
            written.set_fontsize(size)
        return written

    def extent(self, artist: Any) -> float:
        """Return the width of something drawn, in points."""
        return float(artist.get_window_extent(self._renderer).width)

    def place(self, axes: Axes, box: Box) -> None:
        """Move axes into a box."""
        axes.set_position(self._position(box))

    def _position(self, box: Box) -> tuple[float, float, float, float]:
        bottom = self.height - box.y - box.height
        return box.x / self.width, bottom / self.height, box.width / self.width, box.height / self.height
