"""The exponential moving average (EMA) of the weights.

Polyak and Juditsky 1992 showed why averaging helps; this form and its warm-up are TensorFlow's
`ExponentialMovingAverage` and timm's `ModelEmaV3`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def warmed_up_decay(decay: float, steps: int) -> float:
    """Return the decay for a step: `decay`, but less in the first steps, when the average knows little.

    Args:
        decay: 0...1.
        steps: updates done before this one.
    """
    return min(decay, (1 + steps) / (10 + steps))


@torch.no_grad()
def update_average(average: Sequence[Tensor], weights: Sequence[Tensor], decay: float) -> None:
    """Set average = decay * average + (1 - decay) * weights, in place."""
    torch._foreach_lerp_(list(average), list(weights), 1 - decay)
