"""Attention rollout (Abnar and Zuidema 2020, https://arxiv.org/abs/2005.00928): attention followed through all blocks.

It knows no class. Head fusion and the discarding of the smallest weights are additions that are widely used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.explanation.explicit_forward import block_inputs, blocks_of, over_all_tokens, readout, weigh, weigh_pool
from model.network.vit import VisionTransformer
from model.prediction import Fusion


@torch.no_grad()
def rollout(model: VisionTransformer, pixels: Tensor, *, fusion: Fusion = "mean", discard_ratio: float = 0.0) -> Tensor:
    """Return how much of each input token arrives at what the head reads: float32 [B, N], each row summing to 1.

    Each block's matrix is its fused attention plus the identity, for the residual connection, with rows that sum to 1.

    Args:
        pixels: see `model.explanation.methods.explain`.
        fusion: how the heads of a block are combined.
        discard_ratio: share of an image's weights in each block, 0 ... 1, that are set to zero, the smallest first;
            the attention paid to the CLS token stays.
    """
    x = block_inputs(model, pixels, output=model.attn_pool is not None)
    if model.attn_pool is None:
        row = readout(model.config, x[0])
    else:
        row = fuse(weigh_pool(model.attn_pool, model.norm(x[-1])).weights, fusion).squeeze(1)
        row = over_all_tokens(row / row.sum(dim=1, keepdim=True), model.config)
    keep = 1 if model.config.class_token else 0
    for block, entering in zip(reversed(blocks_of(model)), reversed(x[: model.config.depth]), strict=True):
        matrix = discard(fuse(weigh(block, entering).weights, fusion), discard_ratio, keep)
        matrix = matrix + torch.eye(matrix.shape[-1], device=matrix.device)
        matrix = matrix / matrix.sum(dim=-1, keepdim=True)
        row = (row.unsqueeze(1) @ matrix).squeeze(1)
    return row


def fuse(weights: Tensor, fusion: Fusion) -> Tensor:
    """Combine heads: [B, heads, Q, N] -> [B, Q, N]."""
    if fusion == "mean":
        return weights.mean(dim=1)
    return weights.amax(dim=1) if fusion == "max" else weights.amin(dim=1)


def discard(matrix: Tensor, ratio: float, keep: int) -> Tensor:
    """Set each image's smallest weights [B, N, N] to zero, except those paid to its first `keep` tokens."""
    count = int(matrix[0].numel() * ratio)
    if not count:
        return matrix
    smallest = matrix.flatten(1).topk(count, dim=1, largest=False).indices
    dropped = torch.zeros_like(matrix, dtype=torch.bool).flatten(1).scatter(1, smallest, True).view_as(matrix)
    dropped[:, :, :keep] = False
    return matrix.masked_fill(dropped, 0.0)
