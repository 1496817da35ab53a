"""A Vision Transformer in plain torch with timm's names, as users write them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.checkpoint import Checkpoint, load_checkpoint
from tests.model.checkpoint.parity import preprocess_file, randomise

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "tanh": torch.tanh,
}


class HomeAttention(nn.Module):
    """Create attention; `order` is the order of the rows of `qkv`.

    Its letters: 3 for queries, keys and values, h for heads, d for the numbers of a head.
    """

    def __init__(self, width: int, heads: int, order: str) -> None:
        super().__init__()
        self.order = order
        self.sizes = {"3": 3, "h": heads, "d": width // heads}
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


class HomeBlock(nn.Module):
    def __init__(self, made: Mapping[str, Any]) -> None:
        super().__init__()
        width = made["width"]
        hidden = made["hidden"]
        self.norm_first = made["norm_first"]
        self.activation = ACTIVATIONS[made["activation"]]
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=made["eps"]) for _ in range(2))
        self.attn = HomeAttention(width, made["heads"], made["qkv_order"])
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, hidden), "fc2": nn.Linear(hidden, width)})

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self.attn(self.norm1(x))
            z: Tensor = x + self.feed(self.norm2(x))
            return z
        x = self.norm1(x + self.attn(x))
        y: Tensor = self.norm2(x + self.feed(x))
        return y

    def feed(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp["fc2"](self.activation(self.mlp["fc1"](x)))
        return y


_USUAL: Final[dict[str, Any]] = {
    **{
        "size": 16,
        "patch": 4,
        "channels": 3,
        "width": 48,
        "depth": 2,
        "heads": 3,
        "hidden": 192,
        "classes": 5,
    },
    **{"activation": "gelu", "eps": 1e-6, "norm_first": True, "final_norm": True, "pool": "token"},
    **{"qkv_order": "3hd"},
}


class HomeMade(nn.Module):
    """Map [B, C, H, W] to logits [B, classes]; `changes` replace values of `_USUAL`."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        made = _USUAL | changes
        width = made["width"]
        patch = made["patch"]
        self.pool = made["pool"]
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, (made["size"] // patch) ** 2 + 1, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(made["channels"], width, patch, patch)})
        self.blocks = nn.Sequential(*(HomeBlock(made) for _ in range(made["depth"])))
        self.norm = nn.LayerNorm(width, eps=made["eps"]) if made["final_norm"] else nn.Identity()
        self.head: nn.Module = nn.Linear(width, made["classes"])

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embed
        x = self.norm(self.blocks(x))
        y: Tensor = self.head(x[:, 0] if self.pool == "token" else x[:, 1:].mean(dim=1))
        return y


PLAIN = "vit,num_heads=3,norm_order=pre,act_layer=gelu,norm_eps=1e-6,global_pool=token"
"""Return the architecture of `made()` as a user would state it."""


def made(**options: Any) -> HomeMade:
    model = HomeMade(**options).eval()
    randomise(model)
    return model


def load(
    state: Any,
    folder: Path,
    architecture: str | None = None,
    name: str = "weights.pth",
    **options: Any,
) -> Checkpoint:
    """Save an object with `torch.save`, and read it as a model of 16 px and five classes."""
    file = folder / name
    torch.save(state, file)
    if "preprocess" not in options:
        options["preprocess"] = preprocess_file(folder, 16, 16)
    options.setdefault("labels", "numbers")
    return load_checkpoint(str(file), architecture=architecture, **options)
