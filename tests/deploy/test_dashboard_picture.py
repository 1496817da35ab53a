"""The dashboard's picture shows what Prometheus answers, in the places and units of the dashboard."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.transforms import BboxBase
from PIL import Image

from deploy.grafana.picture.__main__ import DASHBOARD, page, picture
from deploy.grafana.picture.series import Window, all_values, resolved, series_of
from deploy.grafana.picture.units import text

WINDOW = Window.before(1_000_003, 60, 5)
PANELS: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
VARIABLES = all_values(json.loads(DASHBOARD.read_text()))


def answer(labels: dict[str, str], *values: float) -> dict[str, Any]:
    """A series of Prometheus' answer, with its first values missing where fewer are given than the window has."""
    times = [WINDOW.end - WINDOW.step * index for index in range(len(values))]
    return {"metric": labels, "values": [[time, str(value)] for time, value in zip(times[::-1], values, strict=True)]}


def query(expression: str, window: Window) -> list[dict[str, Any]]:
    """Answers as a service without a GPU: buckets, an engine of each device, or one number."""
    if "vit_gpu" in expression:
        return []
    if "by (le) (increase" in expression:
        return [answer({"le": le}, *[count] * 13) for le, count in (("0.5", 3), ("+Inf", 10), ("0.1", 1))]
    if "vit_engine_up{" in expression and "sum" not in expression:
        return [answer({"instance": "host", "device": device}, 1, 0.5) for device in ("cuda:1", "cuda:0")]
    return [answer({}, *[0.25] * 13)]


def fully_contains(frame: BboxBase, inner: BboxBase) -> bool:
    """Whether a rectangle lies in another; what touches the edge does."""
    return bool(
        frame.x0 - 1 <= inner.x0 and inner.x1 <= frame.x1 + 1 and frame.y0 - 1 <= inner.y0 and inner.y1 <= frame.y1 + 1
    )


def test_variables_and_intervals_are_filled_in_as_grafana_does() -> None:
    assert Window(begin=999_940, end=1_000_000, step=5, scrape_interval=5) == WINDOW
    assert resolved('a{job=~"$job"}[$__rate_interval] ${__interval}', VARIABLES, WINDOW) == 'a{job=~".*"}[20s] 5s'
    assert "$" not in "".join(
        resolved(target["expr"], VARIABLES, WINDOW) for panel in PANELS for target in panel.get("targets", [])
    )
    assert resolved("$__interval", {}, Window.before(60, 6, 0.5)) == "500ms"
    with pytest.raises(ValueError, match=r"\$other"):
        resolved("a[$other]", VARIABLES, WINDOW)


def test_a_long_window_has_fewer_values_than_scrapes() -> None:
    day = Window.before(1e9, 86_400, 5)
    assert day.step % 5 == 0
    assert day.times.size <= 302
    assert resolved("$__rate_interval", {}, day) == f"{day.step + 5:.0f}s"


def test_series_have_the_legends_names_and_gaps_where_there_is_no_sample() -> None:
    [panel] = [panel for panel in PANELS if panel["title"] == "Engines that are up"]
    first, second = series_of(panel, VARIABLES, WINDOW, query)
    assert (first.name, second.name) == ("host cuda:0", "host cuda:1")
    assert first.last == 0.5
    np.testing.assert_array_equal(first.values, [math.nan] * 11 + [1, 0.5])


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (0.0042, "s", "4.2 ms"),
        (90, "s", "1.5 min"),
        (0, "s", "0 s"),
        (0.0312, "percentunit", "3.12 %"),
        (1, "percentunit", "100 %"),
        (3.5 * 1024**2, "bytes", "3.5 MiB"),
        (12.3456, "reqps", "12.3 req/s"),
        (1510, "short", "1.51 K"),
        (256, "short", "256"),
        (2, "none", "2"),
        (312, "watt", "312 W"),
        (math.inf, "short", "+Inf"),
        (math.nan, "s", "NaN"),
    ],
)
def test_values_are_written_in_their_unit(value: float, unit: str, written: str) -> None:
    assert text(value, unit) == written


def test_the_whole_dashboard_is_drawn_and_nothing_leaves_its_place() -> None:
    drawn = page(json.loads(DASHBOARD.read_text()), WINDOW, query)
    renderer = drawn.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    written = {words.get_text() for words in drawn.figure.texts}

    shown = [panel for panel in PANELS if "vit_gpu" not in json.dumps(panel) and panel["type"] != "row"]
    assert {panel["title"] for panel in shown} <= written
    assert len(shown) >= 20
    assert any("GPUs" in words and "4 panels without data" in words for words in written)
    assert "GPU power" not in written
    frames = [frame.get_window_extent(renderer) for frame in drawn.figure.artists]
    assert len(frames) == len(shown)
    titles = [words for words in drawn.figure.texts if words.get_text() in {panel["title"] for panel in shown}]
    for artist in [*drawn.figure.axes, *drawn.figure.legends, *titles]:
        extent = artist.get_tightbbox(renderer)
        assert extent is not None
        assert sum(fully_contains(frame, extent) for frame in frames) == 1, extent


def test_a_heat_map_has_the_counts_of_its_buckets_and_lines_have_the_values() -> None:
    panels = [panel for panel in PANELS if panel["title"] in {"Traffic and errors", "Batch size", "Kept pictures"}]
    drawn = page(json.loads(DASHBOARD.read_text()) | {"panels": panels}, WINDOW, query)
    [mesh] = [one for axes in drawn.figure.axes for one in axes.collections if isinstance(one, QuadMesh)]
    np.testing.assert_array_equal(np.asarray(mesh.get_array())[:, 0], [1, 2, 7])
    [line] = [one for axes in drawn.figure.axes for one in axes.get_lines()]
    np.testing.assert_array_equal(line.get_ydata(), [0.25] * 13)


def test_bars_and_a_panel_without_data_are_drawn_too() -> None:
    def gpus(expression: str, window: Window) -> list[dict[str, Any]]:
        return [answer({"instance": "host", "gpu": "cuda:0"}, 0.5)] if "memory" in expression else []

    panels = PANELS[[panel["title"] for panel in PANELS].index("GPUs") :]
    dashboard = json.loads(DASHBOARD.read_text()) | {"panels": panels}
    words = [one.get_text() for one in page(dashboard, WINDOW, gpus).figure.texts]
    assert words.count("No data") == 3
    assert {"host cuda:0", "50 %"} <= set(words)
    image = Image.open(io.BytesIO(picture(dashboard, WINDOW, gpus)))
    assert image.format == "PNG"
    assert image.width == 1680
