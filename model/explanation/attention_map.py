"""Conversion of attention rows to maps over the patch grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model.config import ViTConfig
from model.prediction import AttentionMap, Head, MapRequest


def attention_maps(
    attention: Tensor, layers: Sequence[int], requests: Sequence[MapRequest | None], config: ViTConfig
) -> dict[int, AttentionMap]:
    """Return the maps of the requests that are of a row of attention, by their places.

    Requests of the same layer and head, however mixed the batch, are computed in one operation.

    Args:
        attention: rows of these layers, float32 [B, len(layers), heads, N] on the CPU.
    """
    groups: dict[tuple[int, Head], dict[int, MapRequest]] = {}
    for index, request in enumerate(requests):
        if request is not None and request.layer is not None and request.head is not None:
            groups.setdefault((request.layer, request.head), {})[index] = request
    found: dict[int, AttentionMap] = {}
    for (layer, head), members in groups.items():
        rows = attention[list(members), layers.index(layer)]
        maps, kept_mass = cls_map(rows, head=head, prefix_tokens=config.prefix_tokens, grid=config.grid)
        for (member, request), values, kept in zip(members.items(), maps.numpy(), kept_mass.tolist(), strict=True):
            found[member] = AttentionMap(request, values, kept)
    return found


def cls_map(rows: Tensor, *, head: Head, prefix_tokens: int, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Combine the heads, drop the prefix tokens, and divide the rest by its sum.

    Args:
        rows: [B, heads, N] float32, each a softmax over N = prefix_tokens + rows*columns tokens.
        prefix_tokens: number of tokens before the patches (CLS, distillation, registers).
        grid: (rows, columns) of patches; need not be square.

    Returns:
        float32 [B, rows, columns], each map summing to 1; float32 [B], the sum of each before the division.
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
    return values.reshape(-1, *grid), kept
