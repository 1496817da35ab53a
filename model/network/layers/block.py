"""The encoder block and its parts."""

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ViTConfig
from model.layer_config import Activation
from model.network.layers.attention import Attention, norm_or_none

ACTIVATIONS: Final[dict[Activation, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),  # the approximation of OpenAI's CLIP
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class Mlp(nn.Module):
    """Two linear layers with an activation between them.

    Attributes:
        parts: output width of the first layer, in multiples of `mlp_width`.
    """

    parts = 1

    def __init__(self, config: ViTConfig, *, bias: bool = True) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.fc1 = nn.Linear(config.width, self.parts * config.mlp_width, bias=bias)
        self.norm = norm_or_none(config.mlp_width, config.norm_eps, present=config.mlp_norm)
        self.fc2 = nn.Linear(config.mlp_width, config.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        return self.finish(self.fc1(x))

    def finish(self, hidden: Tensor) -> Tensor:
        """Map the first layer's output, [..., parts * mlp_width], to [..., D]."""
        y: Tensor = self.fc2(self.norm(self.activated(hidden)))
        return y

    def activated(self, hidden: Tensor) -> Tensor:
        """Map the first layer's output to [..., mlp_width]."""
        return self.activation(hidden)


class SwiGLU(Mlp):
    """An MLP with act(gate) * value, both from one projection, gate first.

    Shazeer 2020; timm's `SwiGLUPacked`.
    """

    parts = 2

    def activated(self, hidden: Tensor) -> Tensor:
        """Map gates and values, [..., 2 mlp_width], to [..., mlp_width]."""
        gate, value = hidden.chunk(2, dim=-1)
        return self.activation(gate) * value


class LayerScale(nn.Module):
    """A learned factor per channel (Touvron et al. 2021, CaiT)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        return x * self.gamma


class Kept(NamedTuple):
    """The intermediate results of a block's pass that explanations need.

    Attributes:
        x: the block's input, [B, N, D].
        attended: tokens after the attention, [B, queries or N, D].
        hidden: output of the MLP's first layer, if only few tokens are queries.
        q, k, v: see `AttentionInputs`.
    """

    x: Tensor
    attended: Tensor
    hidden: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor


class Block(nn.Module):
    """Encoder block: x + attention(norm(x)), then x + mlp(norm(x)).

    In post-norm, it is norm(x + attention(x)) and so on; in residual post-norm, x +
    norm(attention(x)).
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_order == "pre"
        self.norm_branch = config.norm_order == "res_post"
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ls1: nn.Module = LayerScale(config.width) if config.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        mlp = SwiGLU if config.mlp == "swiglu" else Mlp
        self.mlp = mlp(config, bias=config.projection_bias)
        self.ls2: nn.Module = LayerScale(config.width) if config.layer_scale else nn.Identity()

    def forward(
        self,
        x: Tensor,
        return_attention: bool = False,
        queries: int | None = None,
        keep: bool = False,
    ) -> tuple[Tensor, Tensor | None, Kept | None]:
        """Return the block's output, the attention row, and the intermediate results to keep.

        See `Attention.forward`.

        Returns:
            [B, queries or N, D]; [B, heads, N] float32 or None; `Kept` or None.
        """
        y, row, inputs = self.attn(self.attention_input(x), return_attention, queries, keep)
        attended = self.attended(x, y)
        hidden = None
        if keep and queries is not None and self.norm_first:
            hidden = self.mlp.fc1(self.norm2(attended))
        kept = Kept(x, attended, hidden, *inputs) if keep else None
        return self.finish(attended, hidden), row, kept

    def attention_input(self, x: Tensor) -> Tensor:
        """Return the attention's input [B, N, D], from the block's."""
        y: Tensor = self.norm1(x) if self.norm_first else x
        return y

    def attended(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the tokens after the attention, [B, Q, D].

        Args:
            x: the block's input, [B, N, D].
            y: the attention's output, [B, Q, D].
        """
        x = x[:, : y.shape[1]] + self.ls1(self.norm1(y) if self.norm_branch else y)
        z: Tensor = x if self.norm_first or self.norm_branch else self.norm1(x)
        return z

    def finish(self, attended: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return the block's output, [B, Q, D].

        Args:
            hidden: output of the MLP's first layer, if it is known.
        """
        if hidden is None:
            y = self.mlp(self.norm2(attended) if self.norm_first else attended)
        else:
            y = self.mlp.finish(hidden)
        x: Tensor = attended + self.ls2(self.norm2(y) if self.norm_branch else y)
        return x if self.norm_first or self.norm_branch else self.norm2(x)
