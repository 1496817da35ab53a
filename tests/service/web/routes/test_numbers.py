"""The numbers of answers have the digits that they are known to, and no more."""

from __future__ import annotations

import numpy as np

from model.images.region import Region
from model.outputs import AttentionMap, MapRequest
from service.web.routes.attention import map_fields, region_document
from vitserve.documents import Prediction, ranked

LABELS = ("cat", "dog", "eel")


def test_scores_are_the_shortest_decimals_of_their_floats() -> None:
    fields = ranked(LABELS, [2, 0], np.array([0.83, 1 / 3], np.float32).tolist())
    predictions = [Prediction.model_validate(each) for each in fields]
    assert [(each.label, each.index, each.score) for each in predictions] == [("eel", 2, 0.83), ("cat", 0, 0.3333333)]


def test_a_region_is_told_to_a_thousandth_of_a_pixel() -> None:
    assert region_document(Region(1 / 3, 2 / 3, 100.12345, 7)).model_dump() == {
        "x": 0.333,
        "y": 0.667,
        "width": 100.123,
        "height": 7,
    }


def test_a_map_is_told_to_seven_decimals() -> None:
    values = np.array([[1 / 3, 0.25]], np.float32)
    assert map_fields(AttentionMap(MapRequest.row(2, "max"), values, 2 / 3), LABELS) == {
        "method": "cls",
        "class": None,
        "label": None,
        "grid": (1, 2),
        "layer": 2,
        "head": "max",
        "score": None,
        "evidence": None,
        "values": [[0.3333333, 0.25]],
        "kept_mass": 0.6666667,
    }
    fields = map_fields(AttentionMap(MapRequest("relevance", 1), values, 1.0, 0.1 + 0.2, 1 / 3), LABELS)
    assert [fields[name] for name in ("label", "score", "evidence")] == ["dog", 0.3, 0.3333333]
