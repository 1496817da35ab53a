"""The text towers of CLIP and SigLIP: tokens in, features out (transformers' modeling_clip.py,
modeling_siglip.py).
"""

from functools import partial
from typing import Annotated, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from model.config import ViTConfig
from model.layer_config import Activation, Frozen
from model.network.layers.block import Block


class TextConfig(Frozen):
    """The architecture of a text tower.

    Raises:
        pydantic.ValidationError: a field is missing, unknown, or out of range.
    """

    vocabulary: Annotated[int, Field(ge=1, le=2_000_000)]
    positions: Annotated[int, Field(ge=1, le=4096)]
    width: Annotated[int, Field(ge=1, le=16384)]
    depth: Annotated[int, Field(ge=1, le=256)]
    heads: Annotated[int, Field(ge=1, le=256)]
    mlp_width: Annotated[int, Field(ge=1, le=131072)]
    activation: Activation
    norm_eps: Annotated[float, Field(gt=0, lt=1)]
    feature_width: Annotated[int, Field(ge=1, le=16384)]
    # A token attends to those before it, and the text's end has the feature (CLIP); else the last
    # token (SigLIP).
    causal: bool
    # The token that ends a text, where the first of them is read; None: the token of the highest
    # number.
    end: int | None = None

    def block_config(self) -> ViTConfig:
        """Return the architecture of the blocks, as that of an image's tower with one patch."""
        sizes = self.model_dump(
            include={"width", "depth", "heads", "mlp_width", "activation", "norm_eps"}
        )
        return ViTConfig(
            image_size=(1, 1), patch_size=1, num_classes=1, class_token=False, pool="mean", **sizes
        )


class TextTower(nn.Module):
    """A Transformer over the tokens of texts, with pre-norm blocks as an image's."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        block_config = config.block_config()
        self.token_embed = nn.Embedding(config.vocabulary, config.width)
        self.pos_embed = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(Block(block_config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.feature_width, bias=not config.causal)

    def forward(self, tokens: Tensor, seen: Tensor | None = None) -> Tensor:
        """Map tokens int64 [B, N] to features [B, feature_width].

        Args:
            seen: bool [B, N], which tokens others attend to; None is all. A causal tower, whose
                padding is behind the text's end, needs none.
        """
        batch, count = tokens.shape
        mask = None if seen is None or self.config.causal else seen[:, None, None]
        attend = partial(
            F.scaled_dot_product_attention, attn_mask=mask, is_causal=self.config.causal
        )
        x = self.token_embed(tokens) + self.pos_embed.weight[:count]
        for block in cast(list[Block], list(self.blocks)):
            block.attn.attend = attend
            x = block(x)[0]
        if not self.config.causal:
            place = torch.full((batch,), count - 1)
        else:
            place = (
                tokens if self.config.end is None else (tokens == self.config.end).int()
            ).argmax(dim=1)
        features: Tensor = self.head(self.norm(x)[torch.arange(batch), place])
        return features
