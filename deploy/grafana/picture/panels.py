"""How each type of panel is drawn, from what its queries found."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.patches import FancyBboxPatch, Wedge
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from deploy.grafana.picture.canvas import FAINT, FONT, TEXT, Box, Canvas
from deploy.grafana.picture.series import Series, Window
from deploy.grafana.picture.units import scale, text

_PANEL, _BORDER, _GRID = "#181b1f", "#2c2f36", "#2a2d33"
_NAMED: Final = {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c", "blue": "#5794f2"}
_LINES: Final = (
    "#73bf69",
    "#f2cc0c",
    "#8ab8ff",
    "#ff780a",
    "#f2495c",
    "#5794f2",
    "#b877d9",
    "#fffa91",
    "#96d98d",
    "#ffb357",
    "#c0d8ff",
    "#ff7383",
)
_HEAT: Final = LinearSegmentedColormap.from_list("heat", ["#43230c", "#b3520f", "#ff9830", "#ffe9b8"])
_TICKS: Final = (15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600)


def draw(canvas: Canvas, box: Box, panel: Mapping[str, Any], series: Sequence[Series], window: Window) -> None:
    """Draw a panel with its frame and title.

    Raises:
        KeyError: there is no drawing for its type, or for its unit.
    """
    frame = FancyBboxPatch(
        (box.x / canvas.width, 1 - (box.y + box.height) / canvas.height),
        box.width / canvas.width,
        box.height / canvas.height,
        boxstyle="square,pad=0",
        transform=canvas.figure.transFigure,
        facecolor=_PANEL,
        edgecolor=_BORDER,
        linewidth=1,
        zorder=-1,
    )
    canvas.figure.add_artist(frame)
    canvas.write(box.x + 10, box.y + 16, panel["title"], width=box.width - 20)
    body = box.inner(left=10, top=30, right=12, bottom=8)
    if series:
        _DRAWINGS[panel["type"]](canvas, body, panel, series, window)
    else:
        canvas.write(
            body.x + body.width / 2, body.y + body.height / 2, "No data", color=FAINT, horizontalalignment="center"
        )


def _lines(canvas: Canvas, box: Box, panel: Mapping[str, Any], series: Sequence[Series], window: Window) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    custom, unit = defaults["custom"], defaults["unit"]
    axes = canvas.axes(box)
    colours = [_LINES[index % len(_LINES)] for index in range(len(series))]
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    tops = _stacked(series) if stacked else [one.values for one in series]
    below = np.zeros(window.times.size)
    for one, top, colour in zip(series, tops, colours, strict=True):
        # The line of a layer without height would hide the one below it.
        line = np.where(one.values > 0, top, np.nan) if stacked else top
        axes.plot(window.times, line, color=colour, linewidth=1.3, label=one.name)
        axes.fill_between(window.times, below, top, color=colour, alpha=custom["fillOpacity"] / 100, linewidth=0)
        below = top if stacked else below
    largest = max(float(np.nanmax(top)) for top in tops) or 1.0
    axes.set_ylim(defaults.get("min"), 1.08 * largest)
    _value_axis(axes, unit, largest)
    legend_height = _legend(canvas, axes, box)
    _time_axis(axes, window, box.width)
    canvas.place(axes, box.inner(left=_label_width(canvas, axes), bottom=18 + legend_height))


def _stacked(series: Sequence[Series]) -> list[NDArray[np.float64]]:
    return list(np.cumsum([np.nan_to_num(one.values) for one in series], axis=0))


def _legend(canvas: Canvas, axes: Axes, box: Box) -> float:
    """Draw the names of the lines below them, in as many columns as fit; return the height that they take."""
    names = len(axes.get_lines())
    for columns in range(names, 0, -1):
        legend = canvas.figure.legend(
            handles=axes.get_lines(),
            loc="lower left",
            bbox_to_anchor=((box.x - 4) / canvas.width, 1 - (box.y + box.height + 2) / canvas.height),
            ncols=columns,
            frameon=False,
            fontsize=FONT - 2,
            labelcolor=TEXT,
            borderpad=0,
            borderaxespad=0,
            columnspacing=1.0,
            handlelength=1.0,
            handletextpad=0.4,
            labelspacing=0.35,
        )
        if canvas.extent(legend) <= box.width + 4 or columns == 1:
            break
        legend.remove()
    for handle in legend.get_lines():
        handle.set_linewidth(3)
    return 15.0 * math.ceil(names / columns) + 2


def _value_axis(axes: Axes, unit: str, largest: float) -> None:
    size, suffix = scale(unit, largest)
    highest = axes.get_ylim()[1]
    ticks = np.asarray(MaxNLocator(4, integer=unit == "none").tick_values(0, highest / size)) * size
    axes.set_yticks(ticks[ticks <= highest])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:g}{suffix}" if value else "0"))
    axes.grid(axis="both", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _time_axis(axes: Axes, window: Window, width: float) -> None:
    seconds = window.end - window.begin
    every = next((tick for tick in _TICKS if seconds / tick * 48 <= width), _TICKS[-1])
    # Half a label from both ends, so that none leaves the panel or touches the values.
    edge = 18 / width * seconds
    first, end = math.ceil((window.begin + edge) / every) * every, window.end - edge
    axes.set_xticks(np.arange(first, end, every))
    form = "%H:%M" if every >= 60 else "%H:%M:%S"
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _: datetime.fromtimestamp(time, UTC).strftime(form)))
    axes.set_xlim(window.begin, window.end)


def _label_width(canvas: Canvas, axes: Axes) -> float:
    return 6 + max((canvas.extent(label) for label in axes.get_yticklabels()), default=0)


def _heat_map(canvas: Canvas, box: Box, panel: Mapping[str, Any], series: Sequence[Series], window: Window) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    ordered = sorted(series, key=lambda one: float(one.labels["le"]))
    counts = np.diff(np.nan_to_num([one.values for one in ordered]), axis=0, prepend=0.0)
    axes = canvas.axes(box)
    edges = np.append(window.times, window.end + window.step) - window.step / 2
    largest = float(counts.max()) or 1.0
    shown = np.ma.masked_less_equal(counts, 1e-9)
    axes.pcolormesh(edges, np.arange(len(ordered) + 1), shown, cmap=_HEAT, vmin=0, vmax=largest)
    every = math.ceil(len(ordered) / 7)
    bounds = [float(one.labels["le"]) for one in ordered]
    axes.set_yticks(range(1, len(ordered) + 1)[::every], [text(bound, unit) for bound in bounds[::every]])
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    _time_axis(axes, window, box.width)
    canvas.place(axes, box.inner(left=_label_width(canvas, axes), bottom=40))
    bar = canvas.axes(Box(box.x + 4, box.y + box.height - 16, box.width * 0.4, 6))
    bar.imshow(np.linspace(0, 1, 64)[None], cmap=_HEAT, norm=Normalize(0, 1), aspect="auto")
    bar.set_yticks([])
    bar.set_xticks([0, 63], ["0", text(largest, "short")])


def _number(canvas: Canvas, box: Box, panel: Mapping[str, Any], series: Sequence[Series], window: Window) -> None:
    middle = box.x + box.width / 2
    if panel["options"]["textMode"] == "name":
        names = "\n".join(line for one in series for line in textwrap.wrap(one.name, 20))
        canvas.write(
            middle,
            box.y + box.height / 2,
            names,
            size=20,
            width=box.width,
            color=_NAMED["green"],
            horizontalalignment="center",
        )
        return
    defaults = panel["fieldConfig"]["defaults"]
    [one] = series
    colour = _colour(defaults, one.last)
    axes = canvas.axes(Box(box.x - 9, box.y + box.height * 0.6, box.width + 20, box.height * 0.4 + 7))
    axes.plot(window.times, one.values, color=colour, linewidth=1)
    axes.fill_between(window.times, 0, one.values, color=colour, alpha=0.2, linewidth=0)
    axes.set(xlim=(window.begin, window.end), ylim=(0, 1.1 * (float(np.nanmax(one.values)) or 1)), xticks=[], yticks=[])
    canvas.write(
        middle,
        box.y + box.height * 0.3,
        text(one.last, defaults["unit"]),
        size=30,
        width=box.width,
        color=colour,
        horizontalalignment="center",
    )


def _dial(canvas: Canvas, box: Box, panel: Mapping[str, Any], series: Sequence[Series], window: Window) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    [one] = series
    axes = canvas.axes(box)
    axes.set(xlim=(-1.05, 1.05), ylim=(-0.35, 1.05), xticks=[], yticks=[], aspect="equal")

    def angle(value: float) -> float:
        """Return the degrees at which a value stands: the lowest at 200, the highest at -20."""
        share = (value - defaults["min"]) / (defaults["max"] - defaults["min"])
        return 200 - 220 * float(np.clip(share, 0, 1))

    axes.add_patch(Wedge((0, 0), 0.9, -20, 200, width=0.25, facecolor=_GRID))
    axes.add_patch(Wedge((0, 0), 0.9, angle(one.last), 200, width=0.25, facecolor=_colour(defaults, one.last)))
    steps = defaults["thresholds"]["steps"]
    ends = [step["value"] for step in steps[1:]] + [defaults["max"]]
    for step, end in zip(steps, ends, strict=True):
        begin = defaults["min"] if step["value"] is None else step["value"]
        axes.add_patch(
            Wedge((0, 0), 1.02, angle(end), angle(begin), width=0.07, facecolor=_NAMED[step["color"]], linewidth=0)
        )
    colour = _colour(defaults, one.last)
    axes.text(0, 0, text(one.last, defaults["unit"]), fontsize=18, color=colour, ha="center", va="center")


def _bars(canvas: Canvas, box: Box, panel: Mapping[str, Any], series: Sequence[Series], window: Window) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    height = min(60.0, box.height / len(series))
    for index, one in enumerate(series):
        top = box.y + index * height
        colour = _colour(defaults, one.last)
        canvas.write(box.x, top + 10, one.name, size=FONT - 1, width=box.width)
        axes = canvas.axes(Box(box.x, top + 20, box.width - 60, height - 28))
        axes.barh([0], [defaults["max"] - defaults["min"]], height=1, color=_GRID)
        axes.barh([0], [one.last - defaults["min"]], height=1, color=colour)
        axes.set(xlim=(0, defaults["max"] - defaults["min"]), ylim=(-0.5, 0.5), xticks=[], yticks=[])
        right = box.x + box.width
        canvas.write(
            right, top + 6 + height / 2, text(one.last, defaults["unit"]), color=colour, horizontalalignment="right"
        )


def _colour(defaults: Mapping[str, Any], value: float) -> str:
    """Return the colour of the last threshold that a value has reached."""
    steps = defaults["thresholds"]["steps"]
    reached = [step for step in steps if step["value"] is None or value >= step["value"]]
    return _NAMED[reached[-1]["color"]]


_DRAWINGS: Final[dict[str, Callable[[Canvas, Box, Mapping[str, Any], Sequence[Series], Window], None]]] = {
    "timeseries": _lines,
    "heatmap": _heat_map,
    "stat": _number,
    "gauge": _dial,
    "bargauge": _bars,
}
