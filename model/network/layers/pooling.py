"""Pooling of an image's tokens to a vector."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ViTConfig
from model.network.layers.block import ACTIVATIONS, Mlp


def pool_tokens(x: Tensor, config: ViTConfig) -> Tensor:
    """Pool by a fixed rule: [B, N, D] -> [B, D], or [B, 2 D] for `cls_mean`."""
    if config.pool == "cls":
        return x[:, 0]
    patches = x if config.pool_prefix else x[:, config.prefix_tokens :]
    if config.pool == "max":
        return patches.amax(dim=1)
    mean = patches.mean(dim=1)
    if config.pool == "mean":
        return mean
    if config.pool == "mean_max":
        return 0.5 * (patches.amax(dim=1) + mean)
    return torch.cat((x[:, 0], mean), dim=1)


class PreLogits(nn.Module):
    """The first of the two layers of a head, and the activation after it."""

    def __init__(self, config: ViTConfig, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, config.head_width or width)
        self.activation = ACTIVATIONS[config.head_activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, D] to [B, head_width]."""
        return self.activation(self.fc(x))


class AttentionPool(nn.Module):
    """A learned query attends to the tokens, then an MLP (Zhai et al. 2022; big_vision's MAP head)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.head_dim = width // config.heads
        self.skipped = 0 if config.pool_prefix else config.prefix_tokens
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, return_attention: bool = False) -> tuple[Tensor, Tensor | None]:
        """Map [B, N, D] to ([B, D], [B, heads, N] float32 or None).

        Tokens that the pooling does not look at have attention 0.
        """
        batch, _, width = x.shape
        seen = x[:, self.skipped :]
        q = self.q(self.latent).reshape(1, 1, self.heads, self.head_dim).transpose(1, 2).expand(batch, -1, -1, -1)
        k, v = self.kv(seen).reshape(batch, -1, 2, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        row = None
        if return_attention:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)  # [B, heads, 1, seen]
            row = F.pad(scores.float().softmax(dim=-1).squeeze(2), (self.skipped, 0))
        pooled = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, width)
        pooled = self.proj(pooled)
        return pooled + self.mlp(self.norm(pooled)), row
