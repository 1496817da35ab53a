"""PatchDropout: train on a random part of the patches.

Liu et al. 2022, https://arxiv.org/abs/2208.07220; timm's `timm/layers/patch_dropout.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def drop_patches(x: Tensor, rate: float, prefix_tokens: int) -> Tensor:
    """Keep all prefix tokens and a random choice of the patches, another one for each image, in their order.

    Args:
        x: [B, prefix_tokens + P, D], positions already added.
        rate: share of the patches to drop, 0 <= rate < 1; at least one is kept.

    Returns:
        [B, prefix_tokens + max(1, round(P (1 - rate))), D].
    """
    batch, tokens, width = x.shape
    patches = tokens - prefix_tokens
    keep = max(1, round(patches * (1 - rate)))
    if keep == patches:
        return x
    chosen = torch.rand((batch, patches), device=x.device).argsort(dim=1)[:, :keep].sort(dim=1).values
    kept = x[:, prefix_tokens:].gather(1, chosen[:, :, None].expand(-1, -1, width))
    return torch.cat((x[:, :prefix_tokens], kept), dim=1)
