"""The exponential moving average of the weights.

Polyak and Juditsky 1992 showed why averaging helps; this form and its warm-up are TensorFlow's
`ExponentialMovingAverage` and timm's `ModelEmaV3`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def warmed_up_decay(decay: float, steps: int) -> float:
    """What the average keeps of itself at a step: `decay`, less in the beginning, when it knows little.

    Args:
        decay: 0...1.
        steps: updates done before this one.
    """
    return min(decay, (1 + steps) / (10 + steps))


@torch.no_grad()
def update_average(average: Sequence[Tensor], weights: Sequence[Tensor], kept: float) -> None:
    """In place: average = kept * average + (1 - kept) * weights."""
    torch._foreach_lerp_(list(average), list(weights), 1 - kept)
