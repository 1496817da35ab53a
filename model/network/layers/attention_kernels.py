"""Ways to compute softmax(QK^T / sqrt(d)) V, and the mean over queries of softmax(QK^T / sqrt(d)).

`Attention.attend` is of the former kind: each takes q, k and v, [B, heads, N, head_dim], q perhaps with fewer tokens
than k and v, and returns q's shape. `Attention.mean_row` is of the latter kind: each takes q that is scaled
[B, heads, Q, head_dim], k [B, heads, N, head_dim] and a bias on the scores, [1, heads, Q, N] or None, and returns
[B, heads, N] float32.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

SCORES_BYTES: Final = 8 << 20
"""Bound on the bytes of scores that are alive at once in `chunked_attention`: a core's share of the cache."""


def chunked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention step by step, for as many images at a time as keep the scores in cache.

    In bfloat16 on a CPU with native support it takes 0.6 to 0.9 of the time of the fused kernel, which
    computes in float32 there, as long as an image's scores are within `SCORES_BYTES`; beyond, and in
    float32, the fused kernel is faster and is what runs.
    """
    batch, heads, queries, _ = q.shape
    image_bytes = heads * queries * k.shape[2] * q.element_size()
    if q.dtype != torch.bfloat16 or image_bytes > SCORES_BYTES:
        return F.scaled_dot_product_attention(q, k, v)
    images = SCORES_BYTES // image_bytes
    if images >= batch:
        return plain_attention(q, k, v)
    parts = zip(*(torch.split(tensor, images) for tensor in (q, k, v)), strict=True)
    return torch.cat([plain_attention(*part) for part in parts])


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention step by step.

    On a CPU in bfloat16, forward and backward, it is two (577 tokens) to five times (33) faster than the
    fused kernel; in float32 the fused kernel is faster.
    """
    scores: Tensor = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    attended: Tensor = scores.softmax(dim=-1) @ v
    return attended


def mean_row_by_image(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the mean row image by image: on a CPU the scores of one image stay in the cache, those of many do not."""
    rows = []
    for q_i, k_i in zip(q, k, strict=True):
        scores = q_i @ k_i.transpose(-2, -1)  # [heads, Q, N]
        if bias is not None:
            scores = scores + bias[0]
        rows.append(scores.float().softmax(dim=-1).mean(dim=1))
    return torch.stack(rows)


def mean_row_at_once(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the mean row of all images together, for a GPU, and for a compiler that is to serve any batch size.

    As many queries are taken at a time as keep an image's scores below `SCORES_BYTES`.
    """
    _, heads, queries, _ = q.shape
    step = max(1, SCORES_BYTES // (4 * heads * k.shape[2]))
    rows = []
    for start in range(0, queries, step):
        part = slice(start, start + step)
        scores = q[:, :, part] @ k.transpose(-2, -1)  # [B, heads, step, N]
        if bias is not None:
            scores = scores + bias[:, :, part]
        rows.append(scores.float().softmax(dim=-1).sum(dim=2))
    return torch.stack(rows).sum(dim=0) / queries
