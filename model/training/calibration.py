"""Do the scores mean what they say: temperature and expected calibration error.

Guo et al. 2017, https://arxiv.org/abs/1706.04599.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

TEMPERATURE_RANGE: Final = (0.05, 20.0)
"""Where a temperature is looked for; on data that are answered without an error the best one would be 0."""

BINS: Final = 15
"""Of the expected calibration error, as in the paper."""


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature with the lowest negative log-likelihood of softmax(logits / temperature).

    The likelihood has one optimum over the inverse temperature, so a golden-section search finds it.

    Args:
        logits: [N, K], of images that were not trained on.
        labels: int64 [N].
    """
    logits = logits.double()
    golden = (math.sqrt(5) - 1) / 2

    def loss(log_temperature: float) -> float:
        return F.cross_entropy(logits / math.exp(log_temperature), labels).item()

    low, high = (math.log(limit) for limit in TEMPERATURE_RANGE)
    left, right = high - golden * (high - low), low + golden * (high - low)
    loss_left, loss_right = loss(left), loss(right)
    while high - low > 1e-4:
        if loss_left < loss_right:
            high, right, loss_right = right, left, loss_left
            left = high - golden * (high - low)
            loss_left = loss(left)
        else:
            low, left, loss_left = left, right, loss_right
            right = low + golden * (high - low)
            loss_right = loss(right)
    return math.exp((low + high) / 2)


@dataclass(frozen=True)
class ConfidenceBin:
    """The images whose top-1 score lies in one of equally wide intervals of 0...1.

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
    """What a reliability diagram shows.

    Args:
        confidence: [N], the top-1 score of each image, 0...1.
        correct: [N], whether that answer was right.
        bins: how many, of equal width: (lower, upper] as in the paper's definition.
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
    """Mean gap between confidence and accuracy over the bins, weighted by their images: 0 (perfect) ... 1."""
    total = sum(one.count for one in bins)
    return sum(one.count * abs(one.accuracy - one.confidence) for one in bins) / total
