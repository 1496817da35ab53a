"""Conversion of the model's results to the documents of `vitserve.documents`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.images.region import Region
from model.prediction import AttentionMap
from vitserve.documents import Prediction, RegionDocument


def ranked_predictions(
    labels: Sequence[str], indices: NDArray[np.int64], scores: NDArray[np.float32]
) -> list[Prediction]:
    """Return the classes `indices` [k] with their `scores` [k], in the order given."""
    return [
        Prediction(label=labels[index], index=index, score=_significant(score))
        for index, score in zip(indices.tolist(), scores.tolist(), strict=True)
    ]


def map_fields(found: AttentionMap, labels: Sequence[str]) -> dict[str, Any]:
    """Return the fields that `Attention` and `AttentionDocument` share, for a map."""
    request = found.request
    return {
        "method": request.method,
        "fusion": request.fusion,
        "discard": request.discard,
        "class": request.class_index,
        "label": None if request.class_index is None else labels[request.class_index],
        "grid": found.values.shape,
        "layer": request.layer,
        "head": request.head,
        "values": found.values.astype(np.float64).round(7).tolist(),
        "kept_mass": _significant(found.kept_mass),
    }


def region_document(region: Region) -> RegionDocument:
    """Return a region as the wire has it, to a thousandth of a pixel."""
    x, y, width, height = (round(side, 3) for side in region)
    return RegionDocument(x=x, y=y, width=width, height=height)


def _significant(value: float) -> float:
    """Return a float32 without the digits that it does not have: 0.8299999833 becomes 0.83."""
    return float(f"{value:.7g}")
