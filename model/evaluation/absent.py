"""Absent classes: how high the map of a class rises that the model rules out, beside the map of the best class.

A method that only follows gradients explains whatever class it is asked for, and the map of a class that is not in
the picture may look like the best evidence there is. The measure asks for maps of classes far down the ranking, as
they are answered, and compares the highest patch of each with that of the best class's map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from model.evaluation.faithfulness import Maps
from model.outputs import faded

Evidence = Callable[[Tensor, Tensor], Tensor]
"""Takes normalised pixels, float32 [B, C, H, W], and classes, int64 [B]; returns the evidence of each, float32 [B]."""

DRAWN: Final = 3
"""Ranks drawn for each picture, beside the one in the middle."""

_PRESENT: Final = 100
"""Best classes that may be in the picture, of many; of fewer than twice as many classes, it is the better half."""


def absent_ranks(classes: int, generator: np.random.Generator) -> list[int]:
    """Return the ranks from 0 of classes that are taken for absent: the middle one, and some drawn from the lower."""
    middle = classes // 2
    lower = [rank for rank in range(min(_PRESENT, middle), classes) if rank != middle]
    drawn = generator.choice(lower, min(DRAWN, len(lower)), replace=False).tolist() if lower else []
    return [middle, *drawn] if middle else []


def absent_peaks(maps: Maps, evidence: Evidence, picture: Tensor, ranked: Tensor) -> list[float]:
    """Return the peak of each absent class's map relative to the best class's: 1 is as high, and near 0 even.

    Args:
        picture: normalised, float32 [C, H, W].
        ranked: the best class and then the absent ones, int64 [1 + absent].
    """
    pixels = picture.unsqueeze(0).expand(len(ranked), -1, -1, -1)
    with torch.no_grad():
        shares = evidence(pixels, ranked).cpu().numpy()
    peaks = faded(maps(pixels, ranked).detach().float().cpu().numpy(), shares).max(axis=(1, 2))
    relative: list[float] = (peaks[1:] / peaks[0]).tolist()
    return relative
