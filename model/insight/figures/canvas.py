"""Creation of empty matplotlib figures, and writing of figures to files.

Figures are drawn by the Agg canvas and not by `pyplot`, whose global list of figures would keep them
alive and whose backend would look for a display.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from model.errors import FigureError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI: Final = 110


def available() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def require() -> None:
    """Raise FigureError if matplotlib is missing, before any work is done.

    Raises:
        FigureError: matplotlib is not installed.
    """
    if not available():
        raise FigureError("figures need matplotlib: pip install -e '.[figures]' in the clone")


def canvas(width: float, height: float) -> Figure:
    """Return an empty figure of `width` x `height` inches of `DPI` pixels, laid out by the constrained layout.

    Raises:
        FigureError: matplotlib is not installed.
    """
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  an optional extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG, and the folder around it if there is none.

    Raises:
        FigureError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the version of matplotlib in it: the same numbers give the same file.
        figure.savefig(path, format="png", metadata={"Software": None})
    except OSError as error:
        raise FigureError(f"{path}: cannot be written: {error.strerror}") from error
