"""The Vision Transformer: pixels in, logits and the CLS row of attention out.

Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929. Parameter names and shapes are timm's
(`timm/models/vision_transformer.py`), so that its checkpoints load key for key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import Activation, ViTConfig

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class ViTOutput(NamedTuple):
    """What one forward pass gives.

    Attributes:
        logits: [B, num_classes], in the model's dtype.
        attention: [B, len(layers), heads, N] float32, or None when no layer was asked for. Each row
            is a softmax over all N tokens, prefix tokens first.
    """

    logits: Tensor
    attention: Tensor | None


class PatchEmbed(nn.Module):
    """Non-overlapping patches, each through the same linear map: a convolution with stride = kernel."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.in_channels, config.width, kernel_size=config.patch_size, stride=config.patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, gh*gw, D], row by row."""
        x: Tensor = self.proj(pixels)
        return x.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention with one fused QKV projection."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_dim = config.width // config.heads
        self.source = config.attention_source
        self.prefix_tokens = config.prefix_tokens
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.qkv_bias)
        self.proj = nn.Linear(config.width, config.width)
        # (q, k, v), each [B, heads, N, head_dim] -> the same shape; training may put another kernel here.
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = F.scaled_dot_product_attention

    def forward(self, x: Tensor, need_row: bool = False) -> tuple[Tensor, Tensor | None]:
        """[B, N, D] -> ([B, N, D], [B, heads, N] float32 or None)."""
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # each [B, heads, N, head_dim]
        row = self._row(q, k) if need_row else None
        x = self.attend(q, k, v)
        x = self.proj(x.transpose(1, 2).reshape(batch, tokens, width))
        return x, row

    def _row(self, q: Tensor, k: Tensor) -> Tensor:
        """The attention row a map is made of: [B, heads, N], float32.

        Softmax rows are independent, so the CLS row needs q_cls alone and never the N x N matrix.
        A model that pools by mean has no single query; its row is the mean over the patch queries,
        taken one image at a time so that no more than [heads, N, N] is alive.
        """
        scale = self.head_dim**-0.5
        if self.source == "cls":
            scores = (q[:, :, :1] * scale) @ k.transpose(-2, -1)  # [B, heads, 1, N]
            row: Tensor = scores.float().softmax(dim=-1).squeeze(2)
            return row
        rows = [
            ((q_i[:, self.prefix_tokens :] * scale) @ k_i.transpose(-2, -1)).float().softmax(dim=-1).mean(dim=1)
            for q_i, k_i in zip(q, k, strict=True)
        ]
        return torch.stack(rows)


class Mlp(nn.Module):
    """Two linear layers with the activation between them."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[config.activation]
        self.fc1 = nn.Linear(config.width, config.mlp_width)
        self.fc2 = nn.Linear(config.mlp_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        y: Tensor = self.fc2(self.activation(self.fc1(x)))
        return y


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training, drops a residual branch for whole samples."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Same shape; the kept samples are scaled by 1 / (1 - rate)."""
        if not self.training or self.rate == 0.0:
            return x
        keep = 1.0 - self.rate
        mask = x.new_empty(x.shape[0], *(1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask / keep


class Block(nn.Module):
    """Pre-norm encoder block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, need_row: bool = False) -> tuple[Tensor, Tensor | None]:
        """[B, N, D] -> ([B, N, D], [B, heads, N] float32 or None)."""
        y, row = self.attn(self.norm1(x), need_row)
        x = x + self.drop_path(y)
        x = x + self.drop_path(self.mlp(self.norm2(x)))
        return x, row


class VisionTransformer(nn.Module):
    """ViT for classification.

    Args:
        config: the architecture.
        drop_path: stochastic depth rate of the last block, rising linearly from 0; training only.
    """

    def __init__(self, config: ViTConfig, *, drop_path: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width)) if config.class_token else None
        self.pos_embed = nn.Parameter(torch.zeros(1, config.tokens, config.width))
        rates = [drop_path * i / max(config.depth - 1, 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        if config.norm_after_pool:
            self.norm: nn.Module = nn.Identity()
            self.fc_norm: nn.Module = norm
        else:
            self.norm = norm
            self.fc_norm = nn.Identity()
        self.head = nn.Linear(config.width, config.num_classes)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise for training from scratch: truncated normal (std 0.02) as timm and the JAX code do."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                # LayerNorm weights start at one, every bias at zero.
                nn.init.constant_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0)
            elif name == "head.weight":
                nn.init.zeros_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=0.02, generator=generator)

    def embed(self, pixels: Tensor) -> Tensor:
        """[B, C, H, W] normalised pixels -> [B, N, D] tokens with positions added."""
        x: Tensor = self.patch_embed(pixels)
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        return x + self.pos_embed

    def pool(self, x: Tensor) -> Tensor:
        """[B, N, D] -> [B, D]."""
        if self.config.pool == "cls":
            return x[:, 0]
        return x[:, self.config.prefix_tokens :].mean(dim=1)

    def forward(self, pixels: Tensor, attention_layers: Sequence[int] = ()) -> ViTOutput:
        """Classify a batch.

        Args:
            pixels: [B, C, H, W], normalised, in the model's dtype; H, W = `config.image_size`.
            attention_layers: layers (0 is the first) whose attention row is wanted, in the order wanted.

        Returns:
            Logits and, for the asked-for layers, the attention rows; see `ViTOutput`.
        """
        x = self.embed(pixels)
        rows: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            x, row = block(x, index in attention_layers)
            if row is not None:
                rows[index] = row
        logits = self.head(self.fc_norm(self.pool(self.norm(x))))
        attention = torch.stack([rows[i] for i in attention_layers], dim=1) if attention_layers else None
        return ViTOutput(logits, attention)


def resize_position_embedding(
    pos_embed: Tensor, *, prefix_tokens: int, old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> Tensor:
    """Interpolate learned position embeddings to another grid.

    2D bicubic with antialiasing in float32, prefix tokens kept as they are; as timm's
    `resample_abs_pos_embed` (timm/layers/pos_embed.py).

    Args:
        pos_embed: [1, prefix_tokens + old_rows*old_columns, D].
        prefix_tokens: embeddings before the grid's.
        old_grid, new_grid: (rows, columns) of patches.

    Returns:
        [1, prefix_tokens + new_rows*new_columns, D], same dtype.
    """
    if old_grid == new_grid:
        return pos_embed
    prefix, grid = pos_embed[:, :prefix_tokens], pos_embed[:, prefix_tokens:]
    width = grid.shape[-1]
    grid = grid.float().reshape(1, *old_grid, width).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=new_grid, mode="bicubic", antialias=True)
    grid = grid.permute(0, 2, 3, 1).reshape(1, -1, width).to(pos_embed.dtype)
    return torch.cat((prefix, grid), dim=1)


def count_parameters(model: nn.Module) -> int:
    """Number of trainable scalars."""
    return sum(p.numel() for p in model.parameters())
