"""Deletion and insertion: whether the patches that a map names are those that the score depends on.

Petsiuk, Das and Saenko 2018, "RISE: Randomized Input Sampling for Explanation of Black-box Models",
https://arxiv.org/abs/1806.07421. Patches are taken in descending order of the map. Deletion replaces them in the
picture by the mean colour: after a good map the class's score falls at once, and the area under it is small.
Insertion puts them into a blurred picture: the score rises at once, and the area is large.

Both have critics. Pictures with patches missing are unlike those that the model was trained on, so that a score may
fall because of the damage; and only the order of a map counts, not its values (Wu et al., CVPR 2024, "On the
Faithfulness of Vision Transformer Explanations", which proposes SaCo, https://arxiv.org/abs/2404.01415).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

Score = Callable[[Tensor], Tensor]
"""Takes normalised pixels, float32 [B, C, H, W]; returns the score of each class, float32 [B, K], 0...1."""

Maps = Callable[[Tensor, Tensor], Tensor]
"""Takes normalised pixels, float32 [B, C, H, W], and classes, int64 [B]; returns a map of each, [B, rows, columns]."""

DEFAULT_STEPS: Final = 28
BATCH: Final = 32
"""Largest number of pictures that are scored at a time."""

_BLUR: Final = 1 / 16
"""Standard deviation of the blur as a share of the picture's shorter side: 14 pixels of 224, 2 of 32."""


def patch_order(relevance: Tensor) -> Tensor:
    """Return the patches of a map, [rows, columns], from the highest to the lowest: int64 [rows * columns].

    Patches of equal value keep their order, row by row, so that the same map always gives the same order.
    """
    return relevance.flatten().argsort(descending=True, stable=True)


def patch_counts(patches: int, steps: int) -> Tensor:
    """Return how many patches are taken after each of `steps` even steps from none to all: int64, ascending.

    There are no more steps than patches.
    """
    return torch.tensor(sorted({round(step * patches / steps) for step in range(steps + 1)}))


def replace_patches(start: Tensor, end: Tensor, order: Tensor, counts: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return a picture for each count: `start` with the first patches of `order` taken from `end`.

    Args:
        start: float32 [C, H, W].
        end: float32 [C, H, W], or what broadcasts to it.
        order: int64 [rows * columns], see `patch_order`.
        counts: int64 [S].
        grid: (rows, columns) of patches.

    Returns:
        float32 [S, C, H, W].
    """
    rank = order.argsort()
    taken = (rank < counts.to(rank.device).unsqueeze(1)).float().reshape(-1, 1, *grid)
    return torch.where(F.interpolate(taken, size=start.shape[-2:], mode="nearest-exact").bool(), end, start)


@torch.no_grad()
def area_under_score(
    score: Score, start: Tensor, end: Tensor, relevance: Tensor, class_index: int, *, steps: int = DEFAULT_STEPS
) -> float:
    """Return the area, 0...1, under the score of a class while a picture's patches are replaced in a map's order.

    The area is that of trapezoids over the share of patches that are replaced.

    Args:
        start: the picture before the first step, normalised, float32 [C, H, W].
        end: the picture after the last step, or what broadcasts to it: the mean colour is 0.
        relevance: [rows, columns].
    """
    counts = patch_counts(relevance.numel(), steps)
    order = patch_order(relevance)
    grid = (relevance.shape[0], relevance.shape[1])
    scores = []
    for first in range(0, len(counts), BATCH):
        changed = replace_patches(start, end, order, counts[first : first + BATCH], grid)
        scores.append(score(changed)[:, class_index].double().cpu())
    return float(torch.trapezoid(torch.cat(scores), counts.double() / relevance.numel()))


def deletion(
    score: Score, picture: Tensor, relevance: Tensor, class_index: int, *, steps: int = DEFAULT_STEPS
) -> float:
    """Return the area under the score of a class while patches become the mean colour; lower is better."""
    return area_under_score(score, picture, picture.new_zeros(()), relevance, class_index, steps=steps)


def insertion(
    score: Score, picture: Tensor, blurred: Tensor, relevance: Tensor, class_index: int, *, steps: int = DEFAULT_STEPS
) -> float:
    """Return the area under the score of a class while a blurred picture's patches become sharp; higher is better."""
    return area_under_score(score, blurred, picture, relevance, class_index, steps=steps)


def blur(picture: Tensor) -> Tensor:
    """Return a picture, float32 [C, H, W], blurred by a Gaussian of 1/16 of its shorter side; borders are mirrored."""
    channels, height, width = picture.shape
    sigma = _BLUR * min(height, width)
    radius = min(math.ceil(3 * sigma), height - 1, width - 1)
    offsets = torch.arange(-radius, radius + 1, dtype=picture.dtype, device=picture.device)
    kernel = (-(offsets**2) / (2 * sigma**2)).exp()
    kernel = (kernel / kernel.sum()).expand(channels, 1, 1, -1)
    padded = F.pad(picture.unsqueeze(0), (radius, radius, radius, radius), mode="reflect")
    across = F.conv2d(padded, kernel, groups=channels)
    return F.conv2d(across, kernel.transpose(2, 3), groups=channels).squeeze(0)
