"""Do the scores mean what they say: temperature and expected calibration error.

Guo et al. 2017, https://arxiv.org/abs/1706.04599.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

TEMPERATURE_RANGE: Final = (0.05, 20.0)
"""Where a temperature is looked for; on data that are answered without an error the best one would be 0."""


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


def expected_calibration_error(confidence: NDArray[np.float32], correct: NDArray[np.bool_], *, bins: int = 15) -> float:
    """Mean gap between confidence and accuracy over equally wide bins of confidence, weighted by their images.

    Args:
        confidence: [N], the top-1 score of each image, 0...1.
        correct: [N], whether that answer was right.
        bins: 15 in the paper.

    Returns:
        0 (perfect) ... 1.
    """
    # Bins are (lower, upper] as in the paper's definition.
    bin_of = np.clip(np.ceil(confidence.astype(np.float64) * bins).astype(np.int64) - 1, 0, bins - 1)
    gaps = np.bincount(bin_of, weights=correct.astype(np.float64) - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))
