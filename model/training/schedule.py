"""The schedule of a run: its progress, the remaining time, and the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The length of a run, in steps and in time; it ends with whichever comes first.

    Attributes:
        steps: updates in all.
        seconds: wall time of training; None where it is not limited.
    """

    steps: int
    seconds: float | None

    def progress(self, steps: int, seconds: float) -> float:
        """Return the share of the schedule that is done after `steps` and `seconds`; 1 or more: it is over."""
        by_steps = steps / self.steps
        return by_steps if self.seconds is None else max(by_steps, seconds / self.seconds)

    def seconds_left(self, steps: int, seconds: float, seconds_per_step: float) -> float:
        """Return the seconds until the schedule ends at this pace, after `steps` and `seconds`."""
        left = seconds_per_step * (self.steps - steps)
        if self.seconds is not None:
            left = min(left, self.seconds - seconds)
        return max(left, 0.0)


def rate_factor(progress: float, warmup: float) -> float:
    """Return the share of the peak learning rate: a linear warm-up from almost zero, then a cosine to zero.

    Both arguments are shares of the schedule, 0...1: the part that is done, and the part that the warm-up takes.
    """
    if progress < warmup:
        return max(progress / warmup, 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
