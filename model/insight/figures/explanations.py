"""The figure of how faithful maps are: deletion, insertion and mosaic share of each method, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from model.insight.figures.canvas import canvas, save

_Interval = tuple[float, float, float]
"""A mean, and the ends of its confidence interval."""


class Method(Protocol):
    """The part of `model.evaluation.explanations.MethodResult` that is drawn."""

    @property
    def method(self) -> str: ...  # noqa: D102
    @property
    def deletion(self) -> _Interval: ...  # noqa: D102
    @property
    def insertion(self) -> _Interval: ...  # noqa: D102
    @property
    def mosaic(self) -> _Interval | None: ...  # noqa: D102


def faithfulness(methods: Sequence[Method], path: Path, *, title: str) -> None:
    """Draw the three measures side by side: a dot a method with its interval, a dotted line through the baseline.

    It writes a PNG to `path` and raises FigureError where matplotlib is missing or the file cannot be written.

    Args:
        methods: from top to bottom; the first is the baseline.
        title: model, pictures and steps.
    """
    figure = canvas(9, 1.6 + 0.3 * len(methods))
    places = range(len(methods))
    panels: tuple[tuple[str, list[_Interval | None]], ...] = (
        ("deletion: area, lower is better", [one.deletion for one in methods]),
        ("insertion: area, higher is better", [one.insertion for one in methods]),
        ("mosaic: share, higher is better", [one.mosaic for one in methods]),
    )
    for axes, (name, values) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        if values[0] is not None:
            axes.axvline(values[0][0], color="tab:gray", linestyle=":", linewidth=1)
        for place, value in zip(places, values, strict=True):
            if value is not None:
                mean, low, high = value
                axes.plot([low, high], [place, place], "-", color="tab:blue", linewidth=1.5)
                axes.plot([mean], [place], "o", color="tab:blue", markersize=5)
        axes.set(xlabel=name)
        axes.set_yticks(places, [one.method for one in methods])
        axes.locator_params(axis="x", nbins=5)
        axes.grid(alpha=0.3, axis="x")
    figure.axes[0].set_ylim(len(methods) - 0.5, -0.5)
    figure.suptitle(title, fontsize=9)
    save(figure, path)
