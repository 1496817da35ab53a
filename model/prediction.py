"""The data types of a prediction's input and output; they need no torch, so that every process can use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True, slots=True)
class AttentionMap:
    """Where the model looked in one image.

    Attributes:
        layer, head: as requested.
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
