"""The mosaic test: of a picture made of four, how much of a class's map lies in that class's quarter.

Four pictures at half size stand in a 2 x 2 mosaic, and a map is made for the class of each. A map that knows its class
lies in that class's quarter; a map of whatever is striking has about a quarter of its mass there. After the Focus
of Arias-Duart et al. 2022, "Focus! Rating XAI Methods and Finding Biases", https://arxiv.org/abs/2109.15035, which has
two pictures of the class in a mosaic. The test asks whether a map tells classes apart, and not whether it is right
about what the score depends on: a model may well use the other quarters, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model.evaluation.faithfulness import Maps, Score

CHANCE: Final = 0.25
TOP: Final = 10
"""A quarter counts if its class is among so many best classes of the mosaic: of other classes the model saw nothing."""


def mosaic(pictures: Tensor) -> Tensor:
    """Return four pictures, [4, C, H, W], at half size as a mosaic, [C, H, W], in reading order."""
    height, width = pictures.shape[-2:]
    rows = [
        [F.adaptive_avg_pool2d(pictures[2 * row + column], (high, wide)) for column, wide in enumerate(_halves(width))]
        for row, high in enumerate(_halves(height))
    ]
    return torch.cat([torch.cat(row, dim=-1) for row in rows], dim=-2)


def counted_quarters(scores: Tensor, classes: Tensor) -> list[int]:
    """Return the quarters, 0...3, whose class no other quarter has and is among the best of the mosaic.

    Args:
        scores: float32 [K], of the mosaic.
        classes: int64 [4], the best class of each picture by itself.
    """
    best = scores.topk(min(TOP, len(scores))).indices.tolist()
    of_quarters = classes.tolist()
    return [quarter for quarter, label in enumerate(of_quarters) if of_quarters.count(label) == 1 and label in best]


def quarter_share(relevance: Tensor, quarter: int) -> float:
    """Return the share of the positive part of a map, [rows, columns], that lies in a quarter of it: 0...1.

    A row or column of patches in the middle of an odd number counts by halves. A map without a positive part marks
    nothing and has the share of an even map.
    """
    positive = relevance.double().clamp_min(0)
    total = float(positive.sum())
    if total == 0:
        return CHANCE
    down, across = (_half(size, second) for size, second in zip(relevance.shape, divmod(quarter, 2), strict=True))
    return float(down @ positive.cpu() @ across) / total


def mosaic_shares(
    score: Score, methods: Mapping[str, Maps], pictures: Tensor, classes: Tensor
) -> dict[int, dict[str, float]]:
    """Return the share of each method's map in its quarter, for every quarter that counts.

    Args:
        pictures: normalised, float32 [4, C, H, W].
        classes: int64 [4], the best class of each picture by itself.
    """
    whole = mosaic(pictures).unsqueeze(0)
    with torch.no_grad():
        scores = score(whole)[0]
    quarters = counted_quarters(scores, classes)
    shares: dict[int, dict[str, float]] = {quarter: {} for quarter in quarters}
    if quarters:
        for method, maps in methods.items():
            relevances = maps(whole.expand(len(quarters), -1, -1, -1), classes[quarters])
            for quarter, relevance in zip(quarters, relevances, strict=True):
                shares[quarter][method] = quarter_share(relevance, quarter)
    return shares


def _halves(size: int) -> tuple[int, int]:
    return size // 2, size - size // 2


def _half(size: int, second: int) -> Tensor:
    """Return which part of each of `size` patches lies in the first or second half: float64 [size]."""
    first = (size / 2 - torch.arange(size, dtype=torch.float64)).clamp(0, 1)
    return 1 - first if second else first
