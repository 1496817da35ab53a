"""From attention rows to maps over the patch grid."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from model.prediction import Head


class Maps(NamedTuple):
    """Attributes:
    values: float32 [B, rows, columns], each map summing to 1.
    kept_mass: float32 [B], the sum before the division.
    """

    values: Tensor
    kept_mass: Tensor


def cls_map(rows: Tensor, *, head: Head, prefix_tokens: int, grid: tuple[int, int]) -> Maps:
    """Combine the heads, drop the prefix tokens, divide the rest by its sum.

    Args:
        rows: [B, heads, N] float32, each a softmax over N = prefix_tokens + rows*columns tokens.
        head: a head's number, `mean` or `max` over all heads.
        prefix_tokens: how many tokens come before the patches (CLS, distillation, registers).
        grid: (rows, columns) of patches; need not be square.
    """
    if head == "mean":
        row = rows.mean(dim=1)
    elif head == "max":
        row = rows.amax(dim=1)
    else:
        row = rows[:, head]
    patches = row[:, prefix_tokens:]
    kept = patches.sum(dim=-1)
    # A head may give the patches nothing at all; the smallest float keeps its map finite.
    values = patches / kept.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return Maps(values.reshape(-1, *grid), kept)
