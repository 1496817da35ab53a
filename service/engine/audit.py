"""The audit: a small sample of the pictures that were answered is computed again in float32, while the device is idle.

A graph in int8 was measured on pictures of another day. Whether it still has float32's best class on the pictures that
come today, only they can tell.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.engine.base import ModelRunner
from service.engine.messages import InferenceResult

KEPT: Final = 4
"""Pictures that wait for an idle moment at most; the oldest gives way."""

WINDOW: Final = 1000
"""Audited pictures that the share is of, at most: the last ones."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The outcome of one picture.

    Attributes:
        agrees: whether its best class is float32's.
        agreement: share of the last audited pictures of which that was so, `WINDOW` at most.
    """

    device: str
    agrees: bool
    agreement: float


class Sample(NamedTuple):
    """A picture, uint8 [H, W, C], and the best class that was answered."""

    pixels: NDArray[np.uint8]
    best_class: int


class Audit:
    """A bounded sample of live pictures, and what came out of the last ones. Not thread-safe by itself.

    Args:
        share: of the pictures, 0...1; 0 takes none.
        draw: returns numbers that are evenly distributed over 0...1.
    """

    def __init__(self, share: float, draw: Callable[[], float] = random.random) -> None:
        self._share = share
        self._draw = draw
        self._waiting: deque[Sample] = deque(maxlen=KEPT)
        self._agreed: deque[bool] = deque(maxlen=WINDOW)

    def __len__(self) -> int:
        """Return how many pictures wait."""
        return len(self._waiting)

    def offer(self, pixels: Sequence[NDArray[np.uint8]], outcomes: Sequence[object]) -> bool:
        """Take some of the pictures of a batch that were answered; return whether one was taken."""
        taken = False
        for image, outcome in zip(pixels, outcomes, strict=True):
            if self._share and isinstance(outcome, InferenceResult) and self._draw() < self._share:
                # A copy: pixels may lie in memory that is the next picture's once this one is answered.
                self._waiting.append(Sample(image.copy(), int(outcome.outputs.indices[0])))
                taken = True
        return taken

    def take(self) -> Sample:
        """Return the oldest picture that waits."""
        return self._waiting.popleft()

    def report(self, sample: Sample, runner: ModelRunner) -> AuditReport:
        """Compute a picture again, and return whether the answer agrees; raises as `ModelRunner.reference_class`."""
        agrees = runner.reference_class(sample.pixels) == sample.best_class
        self._agreed.append(agrees)
        return AuditReport(runner.device, agrees, sum(self._agreed) / len(self._agreed))
