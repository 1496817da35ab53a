"""The text towers of CLIP and SigLIP: tokens in, features out.

See transformers' modeling_clip.py and modeling_siglip.py.
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
    # CLIP: a token attends only to earlier tokens, and the feature is at the text's end. SigLIP:
    # the feature is at the last token.
    causal: bool
    # The token at a text's end; only its first occurrence counts. None: the token with the highest
    # number.
    end: int | None = None

    def block_config(self) -> ViTConfig:
        """Return the architecture of the blocks: an image tower with one patch."""
        sizes = self.model_dump(
            include={"width", "depth", "heads", "mlp_width", "activation", "norm_eps"}
        )
        return ViTConfig(
            image_size=(1, 1), patch_size=1, num_classes=1, class_token=False, pool="mean", **sizes
        )


class TextTower(nn.Module):
    """A Transformer over the tokens of texts, with the pre-norm blocks of an image tower."""

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
            seen: bool [B, N], the tokens that others attend to; None: all. A causal tower needs no
                mask, because its padding follows the text's end.
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
            position = torch.full((batch,), count - 1)
        elif self.config.end is None:
            position = tokens.argmax(dim=1)
        else:
            position = (tokens == self.config.end).int().argmax(dim=1)
        features: Tensor = self.head(self.norm(x)[torch.arange(batch), position])
        return features
