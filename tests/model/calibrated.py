"""Logits with a known right temperature."""

import numpy as np
from numpy.typing import NDArray

from model.calibration import scores_and_energies


def calibrated_logits(count: int = 4000) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Draw labels from softmax(logits): the right temperature is 1 by construction."""
    generator = np.random.default_rng(0)
    logits = 2 * generator.normal(size=(count, 5)).astype(np.float32)
    return logits, np.array(
        [generator.choice(5, p=row) for row in scores_and_energies(logits, 1.0)[0]]
    )
