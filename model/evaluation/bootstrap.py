"""Confidence intervals of means by the bootstrap (Efron 1979), without an assumption about the values' distribution."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95


class Estimate(NamedTuple):
    """A mean, and the interval that holds it with a confidence of 95 %."""

    mean: float
    low: float
    high: float


def estimate_mean(sums: NDArray[np.float64], counts: NDArray[np.int64], *, seed: int = 0) -> Estimate | None:
    """Return the mean of all values and its percentile interval over resamples of the pictures that they belong to.

    Values of one picture are alike, so that they are drawn together; each picture is drawn with replacement.

    Args:
        sums: float64 [N], of each picture's values.
        counts: int64 [N], how many values each picture has; may be 0.
        seed: the same one gives the same interval, and resamples that are the same for several methods.

    Returns:
        None where there are no values.
    """
    if not counts.sum():
        return None
    generator = np.random.default_rng(seed)
    means: list[float] = []
    while len(means) < RESAMPLES:
        drawn = generator.integers(0, len(sums), len(sums))
        if total := counts[drawn].sum():  # a resample may miss every picture that has values
            means.append(float(sums[drawn].sum() / total))
    low, high = np.quantile(means, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Estimate(float(sums.sum() / counts.sum()), float(low), float(high))
