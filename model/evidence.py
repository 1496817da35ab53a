"""The evidence for a class of an image, on a scale common to all classes of a softmax.

From 50 classes on, the evidence is the distance of the class's logit above the mean of all logits:
0 at 1.5 of their standard deviations, 1 at 4. With fewer classes, the evidence is relative to the
best class. A constant that is added to all logits does not change it.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from model.features import Floats

# Smallest divisor, because all logits or all scores may be equal.
_TINY: Final = 1e-30

# Number of classes from which on the spread of an image's logits measures evidence.
_MANY: Final = 50

# Standard deviations above the mean logit at which the evidence for a class is 0, and 1.
_ABSENT: Final = 1.5
_PRESENT: Final = 4.0


def softmax_evidence(logits: Floats, classes: NDArray[np.int64], scores: Floats) -> Floats:
    """Return the evidence for one class per image, float32 [B], 0...1.

    Args:
        logits: [B, C].
        classes: int64 [B].
        scores: of all classes, [B, C].
    """
    if logits.shape[1] >= _MANY:
        return _spread_evidence(logits, classes)
    return _relative_evidence(logits, classes, scores)


def _spread_evidence(logits: Floats, classes: NDArray[np.int64]) -> Floats:
    """Return the evidence for one class per image by the spread of its many logits."""
    exact = logits.astype(np.float64)
    above = np.maximum(exact[np.arange(len(exact)), classes] - exact.mean(axis=1), 0)
    deviations = above / np.maximum(exact.std(axis=1), _TINY)
    evidence = np.clip((deviations - _ABSENT) / (_PRESENT - _ABSENT), 0, 1)
    rounded: Floats = evidence.astype(np.float32)
    return rounded


def _relative_evidence(logits: Floats, classes: NDArray[np.int64], scores: Floats) -> Floats:
    """Return the evidence for one class per image, relative to the best class.

    It is the larger of two ratios, times the best score, so that it is 1 only if the score is. One
    ratio is the class's score to the best one. The other is the squared ratio of their logits, each
    measured above the mean.
    """
    images = np.arange(len(logits))
    exact = logits.astype(np.float64)
    mean = exact.mean(axis=1)
    above = np.maximum(exact[images, classes] - mean, 0)
    above /= np.maximum(exact.max(axis=1) - mean, _TINY)
    highest_score = scores.max(axis=1)
    relative = scores[images, classes] / np.maximum(highest_score, np.float32(_TINY))
    ratio = np.maximum(np.square(above).astype(np.float32), relative)
    evidence: Floats = np.clip(highest_score * ratio, 0, 1)
    return evidence
