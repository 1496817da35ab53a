"""The benchmark of maps behind classification: its number, and that it tells when the bound is not kept."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.explanations import BOUND, maps_protocol, report, summary
from benchmarks.load import Load


def seen(p99: float) -> dict[str, Any]:
    return Load(10.0, p99 / 4, p99 / 2, p99, 2 * p99, 0, 0).as_json()


def test_the_number_is_the_ratio_of_the_medians() -> None:
    rounds = [
        {"quiet": seen(quiet), "beside": seen(beside), "maps": seen(300), "load_average": 0.5}
        for quiet, beside in ((10, 11), (20, 26), (400, 27))  # one round was disturbed
    ]
    found = summary(rounds)
    assert found["ratio"] == pytest.approx(26 / 20)
    assert (found["quiet_p99"], found["beside_p99"], found["maps_p99"]) == (20, 26, 300)
    text = report({"rounds": rounds, "rate": 40.0, "method": "gae"})
    assert f"1.30 (bound {BOUND}), 3 rounds" in text


def test_maps_are_asked_for_by_their_method() -> None:
    assert maps_protocol("gae").path == "/attention?method=gae&format=json"
