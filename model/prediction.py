"""What goes into and comes out of a prediction: plain data, no torch, fit for any process."""

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
    """Which attention map is wanted.

    Attributes:
        layer: 0 ... depth-1.
        head: 0 ... heads-1, or how to combine all heads.
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
    """Return how heads are combined (None is `mean`), or one head's number.

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
    """Where the model looked.

    Attributes:
        layer, head: as asked for.
        values: float32 [grid rows, grid columns], summing to 1.
        kept_mass: share of the attention that fell on patches, before the division; the rest went to
            the prefix tokens.
    """

    layer: int
    head: Head
    values: NDArray[np.float32]
    kept_mass: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """One batch's answers, in the order of the images.

    Attributes:
        scores: float32 [B, k], highest first.
        indices: int64 [B, k], the classes the scores belong to.
        finite: bool [B]; False where the model gave a score that is no number, so that the image
            has no answer.
        maps: B entries, None where no map was asked for.
    """

    scores: NDArray[np.float32]
    indices: NDArray[np.int64]
    finite: NDArray[np.bool_]
    maps: list[AttentionMap | None]
