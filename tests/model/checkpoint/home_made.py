"""A Vision Transformer in plain torch, as people write one for themselves, under timm's names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.checkpoint import Checkpoint, load_checkpoint
from tests.model.checkpoint.parity import preprocess_file, randomise

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {"gelu": F.gelu, "relu": F.relu, "tanh": torch.tanh}


class HomeAttention(nn.Module):
    """Args: order: how the rows of `qkv` are counted: 3 of queries, keys and values, h heads, d numbers of a head."""

    def __init__(self, width: int, heads: int, order: str) -> None:
        super().__init__()
        self.order, self.sizes = order, {"3": 3, "h": heads, "d": width // heads}
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(x).view(batch, tokens, *(self.sizes[letter] for letter in self.order))
        places = [2 + self.order.index(letter) for letter in "3hd"]
        q, k, v = parts.permute(places[0], 0, places[1], 1, places[2])
        weights = (q @ k.transpose(-2, -1) * self.sizes["d"] ** -0.5).softmax(dim=-1)
        y: Tensor = self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, width))
        return y


class HomeMlp(nn.Module):
    def __init__(self, width: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(self.activation(self.fc1(x)))
        return y


class HomeBlock(nn.Module):
    def __init__(
        self, width: int, heads: int, hidden: int, activation: str, eps: float, norm_first: bool, order: str
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=eps), nn.LayerNorm(width, eps=eps)
        self.attn = HomeAttention(width, heads, order)
        self.mlp = HomeMlp(width, hidden, activation)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]
        x = self.norm1(x + self.attn(x))
        y: Tensor = self.norm2(x + self.mlp(x))
        return y


class HomeMade(nn.Module):
    """Maps [B, C, H, W] to logits [B, classes].

    Args:
        head: a head in place of one linear layer.
        final_norm: whether a norm stands before the pooling.
    """

    def __init__(
        self,
        *,
        size: int = 16,
        patch: int = 4,
        channels: int = 3,
        width: int = 48,
        depth: int = 2,
        heads: int = 3,
        hidden: int = 192,
        classes: int = 5,
        activation: str = "gelu",
        eps: float = 1e-6,
        norm_first: bool = True,
        final_norm: bool = True,
        pool: str = "token",
        position_prefix: bool = True,
        qkv_order: str = "3hd",
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.pool, self.position_prefix = pool, position_prefix
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + position_prefix, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(channels, width, patch, patch)})
        block = width, heads, hidden, activation, eps, norm_first, qkv_order
        self.blocks = nn.ModuleList(HomeBlock(*block) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=eps) if final_norm else nn.Identity()
        self.head = head or nn.Linear(width, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2)
        if not self.position_prefix:
            x = x + self.pos_embed
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1)
        if self.position_prefix:
            x = x + self.pos_embed
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        y: Tensor = self.head(x[:, 0] if self.pool == "token" else x[:, 1:].mean(dim=1))
        return y


PLAIN = "vit,num_heads=3,norm_order=pre,act_layer=gelu,norm_eps=1e-6,global_pool=token"
"""The truth about `made()`, as its maker would state it."""


def made(**options: Any) -> HomeMade:
    model = HomeMade(**options).eval()
    randomise(model)
    return model


def load(
    state: Any, folder: Path, architecture: str | None = None, name: str = "weights.pth", **options: Any
) -> Checkpoint:
    """Save what `torch.save` takes, and read it as a model of 16 px and five classes."""
    file = folder / name
    torch.save(state, file)
    if "preprocess" not in options:
        options["preprocess"] = preprocess_file(folder, 16, 16)
    options.setdefault("labels", "numbers")
    return load_checkpoint(str(file), architecture=architecture, **options)
