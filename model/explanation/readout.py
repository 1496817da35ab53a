"""The share that each token of the last block's output has in what the head reads."""

from __future__ import annotations

import torch
from torch import Tensor

from model.config import ViTConfig


def readout(config: ViTConfig, x: Tensor) -> Tensor:
    """Return the share of each token in the pooled vector: float32 [B, N], each row summing to 1.

    It is the CLS token, or half of it and half of the distillation token where that has a head; with mean and max
    pooling the mean over the pooled tokens; with `cls_mean` half of each.

    Args:
        x: tokens [B, N, D], for their number and device.
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
