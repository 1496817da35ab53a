"""Relevance: what the attention of the last step brought to one class, at little more than a forward pass's cost."""

from __future__ import annotations

from torch import Tensor

from model.explanation.explicit_forward import block_inputs, blocks_of
from model.explanation.head_gradient import head_gradient
from model.network.vit import VisionTransformer


def relevance(model: VisionTransformer, pixels: Tensor, classes: Tensor) -> Tensor:
    """Return the relevance of each token for the class: float32 [B, N], not negative.

    The attention is that of the tokens which the head reads, in the last block: see `head_gradient`.

    Args:
        pixels, classes: see `model.explanation.methods.explain`.
    """
    x = block_inputs(model, pixels)[-1]
    return combine(*head_gradient(model, blocks_of(model)[-1], x, classes))


def combine(weights: Tensor, gradient: Tensor) -> Tensor:
    """Return the relevance of each token: the positive part of gradient x attention, summed over heads and queries.

    Args:
        weights: attention, float32 [B, heads, Q, N].
        gradient: of the class's logit with respect to it, the same shape.

    Returns:
        float32 [B, N].
    """
    return (weights * gradient).sum(dim=(1, 2)).relu()
