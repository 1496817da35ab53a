"""The data types of a prediction's input and output; they need no torch, so that every process can use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from model.errors import InputError

Head = int | Literal["mean", "max"]
"""One attention head by number, or all of them combined."""


@dataclass(frozen=True, slots=True)
class MapRequest:
    """A request for one attention map.

    Attributes:
        layer: 0 ... depth-1.
        head: 0 ... heads-1, or how all heads are combined.
    """

    layer: int
    head: Head = "mean"


def parse_layer(layer: int | None, depth: int) -> int:
    """Return a layer's number from 0; None is the last, negatives count from the end.

    Raises:
        InputError: a model of `depth` layers has no such layer.
    """
    if layer is None:
        return depth - 1
    if not -depth <= layer < depth:
        raise InputError("layer", f"layer {layer}: the model has layers {-depth} ... {depth - 1}")
    return layer % depth


def parse_head(head: str | None, heads: int) -> Head:
    """Return the way to combine heads (None is `mean`), or one head's number.

    Raises:
        InputError: a model of `heads` heads has no such head.
    """
    if head is None or head == "mean":
        return "mean"
    if head == "max":
        return "max"
    if not head.isascii() or not head.isdecimal() or len(head) > 4 or int(head) >= heads:
        raise InputError("head", f"head {head[:20]!r}: expected mean, max, or 0 ... {heads - 1}")
    return int(head)


@dataclass(frozen=True, slots=True)
class AttentionMap:
    """The attention map of one image.

    Attributes:
        values: float32 [grid rows, grid columns], summing to 1.
        kept_mass: share of the attention that fell on patches; the rest went to the prefix tokens.
    """

    layer: int
    head: Head
    values: NDArray[np.float32]
    kept_mass: float


@dataclass(frozen=True, slots=True)
class BatchPrediction:
    """The top-k classes and attention maps of one batch, in the order of the images.

    Attributes:
        scores: float32 [B, k], highest first.
        indices: int64 [B, k], the classes that the scores belong to.
        finite: bool [B]; False where a score is not finite, so that the image has no prediction.
        maps: B entries, None where no map was requested.
    """

    scores: NDArray[np.float32]
    indices: NDArray[np.int64]
    finite: NDArray[np.bool_]
    maps: list[AttentionMap | None]
