"""Draws Grafana's dashboard from the series of a Prometheus: `make dashboard-picture`. It is no picture of a Grafana.

The panels, their places, titles, units, thresholds and queries are those of deploy/grafana/dashboards/vitserve.json. A
row of which Prometheus knows nothing, such as that of GPUs on a host without one, is drawn closed.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from PIL import Image

from deploy.grafana.picture.canvas import Box, Canvas
from deploy.grafana.picture.panels import draw
from deploy.grafana.picture.scenario import under_load
from deploy.grafana.picture.series import Prometheus, Query, Series, Window, all_values, series_of

REPOSITORY: Final = Path(__file__).resolve().parents[3]
DASHBOARD: Final = REPOSITORY / "deploy/grafana/dashboards/vitserve.json"
_WIDTH, _HEADER, _FOOTER, _EDGE = 1120, 52, 30, 10
# A panel of height h takes h units and the gaps between them.
_UNIT, _GAP = 26, 8
_COLUMN: Final = (_WIDTH - 2 * _EDGE + _GAP) / 24
_SCALE: Final = 1.5
_SETTLE = 0.5
"""Minutes until series that have begun have rates."""

Row = tuple[str, list[tuple[Mapping[str, Any], list[Series]]]]
"""A row's title, and its panels with what their queries found."""


def main() -> None:
    """Draw it from the Prometheus that is named, or from one that has watched services under load."""
    parser = argparse.ArgumentParser(prog="python -m deploy.grafana.picture", description=__doc__)
    parser.add_argument("--prometheus", metavar="URL", help="default: one of its own, with services under load")
    parser.add_argument("--minutes", type=float, default=10, help="of the past that are shown (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs/images/dashboard.png")
    arguments = parser.parse_args()
    given = arguments.prometheus
    with nullcontext(given) if given else under_load(arguments.minutes + _SETTLE) as url:
        prometheus = Prometheus(url)
        window = Window.before(time.time(), 60 * arguments.minutes, prometheus.scrape_interval())
        dashboard = json.loads(DASHBOARD.read_text())
        arguments.output.write_bytes(picture(dashboard, window, prometheus.query))
    sys.stdout.write(f"wrote {arguments.output}\n")


def picture(dashboard: Mapping[str, Any], window: Window, query: Query) -> bytes:
    """Return a PNG of a dashboard over a window of time."""
    buffer = io.BytesIO()
    page(dashboard, window, query).figure.savefig(buffer, format="png", dpi=72 * _SCALE)
    # 256 colours are enough, and take a third of the bytes.
    image = Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def page(dashboard: Mapping[str, Any], window: Window, query: Query) -> Canvas:
    """Return a drawing of a dashboard over a window of time."""
    rows = _rows(dashboard, window, query)
    heights = [1 + (_units(panels) if _has_data(panels) else 0) for _, panels in rows]
    drawn = Canvas(_WIDTH, _HEADER + sum(heights) * (_UNIT + _GAP) + _FOOTER)
    drawn.write(_EDGE + 4, _HEADER / 2, dashboard["title"], size=18)
    chosen = "     ".join(f"{name}: all" for name in all_values(dashboard))
    drawn.write(_EDGE + 120, _HEADER / 2 + 2, chosen)
    begin, end = (datetime.fromtimestamp(moment, UTC) for moment in (window.begin, window.end))
    shown = f"{begin:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S} UTC"
    drawn.write(_WIDTH - _EDGE - 4, _HEADER / 2, shown, horizontalalignment="right")
    top = float(_HEADER)
    for (title, panels), height in zip(rows, heights, strict=True):
        _draw_row(drawn, top, title, panels, window)
        top += height * (_UNIT + _GAP)
    note = "Drawn by `make dashboard-picture` from the series of a Prometheus; not a picture of Grafana."
    drawn.write(_EDGE + 4, top + _FOOTER / 2, note, size=10)
    return drawn


def _rows(dashboard: Mapping[str, Any], window: Window, query: Query) -> list[Row]:
    rows: list[Row] = []
    variables = all_values(dashboard)
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            rows.append((panel["title"], []))
        else:
            rows[-1][1].append((panel, series_of(panel, variables, window, query)))
    return rows


def _draw_row(drawn: Canvas, top: float, title: str, panels: list[tuple[Any, list[Series]]], window: Window) -> None:
    is_open = _has_data(panels)
    mark, closed = ("\u2304", "") if is_open else ("\u203a", f"   ({len(panels)} panels without data)")
    drawn.write(_EDGE + 4, top + _UNIT / 2, f"{mark}  {title}{closed}", size=13)
    if not is_open:
        return
    first = panels[0][0]["gridPos"]["y"]
    for panel, series in panels:
        place = panel["gridPos"]
        box = Box(
            _EDGE + place["x"] * _COLUMN,
            top + (1 + place["y"] - first) * (_UNIT + _GAP),
            place["w"] * _COLUMN - _GAP,
            place["h"] * (_UNIT + _GAP) - _GAP,
        )
        draw(drawn, box, panel, series, window)


def _has_data(panels: list[tuple[Any, list[Series]]]) -> bool:
    return any(series for _, series in panels)


def _units(panels: list[tuple[Any, list[Series]]]) -> int:
    first: int = panels[0][0]["gridPos"]["y"]
    ends: list[int] = [panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel, _ in panels]
    return max(ends) - first


if __name__ == "__main__":
    main()
