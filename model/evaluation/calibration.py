"""Calibration of scores: temperature scaling and expected calibration error.

Guo et al. 2017, https://arxiv.org/abs/1706.04599.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

TEMPERATURE_RANGE: Final = (0.05, 20.0)
"""Range in which a temperature is sought; on data that are answered without an error the best would be 0."""

BINS: Final = 15
"""Number of bins of the expected calibration error, as in the paper."""

_GRID: Final = 60
"""Number of temperatures tried before the best of them is refined."""


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature at which the top-1 score is the best estimate of whether the answer is right.

    Best is the lowest Brier score: the mean of (score - 1 if right, else 0) squared. Guo et al. take the
    likelihood of all classes' scores instead; a single temperature cannot get all of them right, and users read the
    top score. Over twenty random halvings of a validation set this gave a lower calibration error out of sample
    than the likelihood, with and without label smoothing, and scattered less than minimising the error itself.

    Args:
        logits: [N, K], of images that were not trained on.
        labels: int64 [N].
    """
    logits = logits.double()
    answers = logits.argmax(dim=1)
    right = (answers == labels).double()
    golden = (math.sqrt(5) - 1) / 2

    @cache
    def loss(log_temperature: float) -> float:
        top = (logits / math.exp(log_temperature)).softmax(dim=1).amax(dim=1)
        return float((top - right).square().mean())

    # The score may have more than one dip over the whole range: the best of a grid, then golden section around it.
    low, high = (math.log(limit) for limit in TEMPERATURE_RANGE)
    step = (high - low) / (_GRID - 1)
    best = min((low + number * step for number in range(_GRID)), key=loss)
    low, high = max(low, best - step), min(high, best + step)
    inner_low, inner_high = high - golden * (high - low), low + golden * (high - low)
    while high - low > 1e-4:
        if loss(inner_low) < loss(inner_high):
            high, inner_high = inner_high, inner_low
            inner_low = high - golden * (high - low)
        else:
            low, inner_low = inner_low, inner_high
            inner_high = low + golden * (high - low)
    return math.exp((low + high) / 2)


@dataclass(frozen=True)
class ConfidenceBin:
    """The images whose top-1 score lies in an interval of 0...1; all intervals are equally wide.

    Attributes:
        count: images.
        confidence: their mean top-1 score; 0 where there are none.
        accuracy: share of them whose answer was right; 0 where there are none.
    """

    count: int
    confidence: float
    accuracy: float


def confidence_bins(
    confidence: NDArray[np.float32], correct: NDArray[np.bool_], *, bins: int = BINS
) -> tuple[ConfidenceBin, ...]:
    """Return the bins of a reliability diagram.

    Args:
        confidence: [N], the top-1 score of each image, 0...1.
        correct: [N], whether that answer was right.
        bins: number of bins, of equal width: (lower, upper] as in the paper's definition.
    """
    bin_of = np.clip(np.ceil(confidence.astype(np.float64) * bins).astype(np.int64) - 1, 0, bins - 1)
    counts = np.bincount(bin_of, minlength=bins)
    means = np.bincount(bin_of, weights=confidence, minlength=bins) / counts.clip(1)
    shares = np.bincount(bin_of, weights=correct, minlength=bins) / counts.clip(1)
    return tuple(
        ConfidenceBin(int(count), float(mean), float(share))
        for count, mean, share in zip(counts, means, shares, strict=True)
    )


def expected_calibration_error(bins: Sequence[ConfidenceBin]) -> float:
    """Return the mean gap between confidence and accuracy over the bins, weighted by their images; 0 is perfect."""
    total = sum(group.count for group in bins)
    return sum(group.count * abs(group.accuracy - group.confidence) for group in bins) / total
