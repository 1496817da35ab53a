"""How the head reads the last block's tokens: with fixed shares, or with a pooling query."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ViTConfig
from model.network.vit import AttentionPool


class Weighed(NamedTuple):
    """Attention weights and values, before their product.

    Attributes:
        weights: float32 [B, heads, Q, N], each row a softmax over N tokens.
        values: [B, heads, N, head_dim].
    """

    weights: Tensor
    values: Tensor


def mix(weighed: Weighed) -> Tensor:
    """Return the product of weights and values, with the attention heads joined: [B, Q, D]."""
    mixed = weighed.weights.to(weighed.values.dtype) @ weighed.values
    return mixed.transpose(1, 2).flatten(2)


def weigh_pool(pool: AttentionPool, x: Tensor) -> Weighed:
    """Return the pooling query's attention weights, [B, heads, 1, seen], and the values.

    Args:
        x: tokens after the final norm, [B, N, D].
    """
    q, k, v = pool.project(x)
    return Weighed(pool.weights(q, k), v)


def over_all_tokens(seen: Tensor, config: ViTConfig) -> Tensor:
    """Insert zeros for the tokens that the pooling query skips: [..., seen] -> [..., N]."""
    return F.pad(seen, (config.tokens - seen.shape[-1], 0))


def readout(config: ViTConfig, x: Tensor) -> Tensor:
    """Return the share of each token in the pooled vector: float32 [B, N], each row summing to 1.

    The pooled vector is the CLS token, or its mean with the distillation token if that has a head.
    With mean and max pooling, it is the mean over the pooled tokens. `cls_mean` takes half of the
    CLS token and half of that mean.

    Args:
        x: tokens [B, N, D]; only their number and device count.
    """
    row = torch.zeros(x.shape[:2], device=x.device)
    pooled = row if config.pool_prefix else row[:, config.prefix_tokens :]
    if config.pool != "cls":
        pooled += (0.5 if config.pool == "cls_mean" else 1.0) / pooled.shape[1]
    if config.pool == "cls_mean":
        row[:, 0] += 0.5
    elif config.pool == "cls":
        read = 1 + config.distillation_head
        row[:, :read] = 1 / read
    return row
