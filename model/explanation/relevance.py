"""Relevance: what the attention of the last step brought to one class, at little more than a forward pass's cost."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from model.explanation.explicit_forward import block_inputs, blocks_of
from model.explanation.head_gradient import head_gradient
from model.network.vit import VisionTransformer

_RIVALS: Final = 10
_SHARPNESS: Final = 1.5


def relevance(model: VisionTransformer, pixels: Tensor, classes: Tensor) -> Tensor:
    """Return the relevance of each token for the class: float32 [B, N], not negative.

    The attention is that of the tokens which the head reads, in the last block: see `head_gradient`. The gradient is
    that of `lead`.

    Args:
        pixels, classes: see `model.explanation.methods.explain`.
    """
    x = block_inputs(model, pixels)[-1]
    return combine(*head_gradient(model, blocks_of(model)[-1], x, classes, lead))


def lead(logits: Tensor, classes: Tensor) -> Tensor:
    """Return by how much each image's class leads its ten strongest rivals, summed over the images.

    The logit alone also rises with what all likely classes have in common, an animal or a vehicle of any kind; against
    the mean of the rivals this cancels out. A model of fewer classes has fewer rivals, one of a single class none.
    """
    own = logits.gather(1, classes.unsqueeze(1))
    if logits.shape[1] == 1:
        return own.sum()
    others = logits.detach().scatter(1, classes.unsqueeze(1), -torch.inf)
    rivals = others.topk(min(_RIVALS, logits.shape[1] - 1), dim=1).indices
    return own.sum() - logits.gather(1, rivals).mean(dim=1).sum()


def combine(weights: Tensor, gradient: Tensor) -> Tensor:
    """Return the relevance of each token: the positive part of gradient x attention, summed over heads and queries.

    Its power of 1.5 lets the many tokens that brought a little fade against those that brought much. It does not change
    their order.

    Args:
        weights: attention, float32 [B, heads, Q, N].
        gradient: of the class's lead with respect to it, the same shape.

    Returns:
        float32 [B, N], the highest of each image 1 unless all are 0.
    """
    tokens = (weights * gradient).sum(dim=(1, 2)).relu()
    highest = tokens.amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    scaled: Tensor = (tokens / highest) ** _SHARPNESS  # a gradient may be tiny, and its power would vanish
    return scaled
