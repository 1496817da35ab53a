"""Relevance: what the attention of the last step brought to one class.

The head reads few tokens, in most models the CLS token alone. The gradient of a class's logit with respect to the
attention weights of the last block therefore needs a backward pass through these tokens' projection, MLP and norms,
and not through the network: the map costs little more than the forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.explanation.explicit_forward import (
    Weighed,
    block_inputs,
    blocks_of,
    class_scores,
    finish,
    finish_pool,
    over_all_tokens,
    tokens_read,
    weigh,
    weigh_pool,
)
from model.network.vit import VisionTransformer


def relevance(model: VisionTransformer, pixels: Tensor, classes: Tensor) -> Tensor:
    """Return the relevance of each token for the class: float32 [B, N], not negative.

    The attention is that of the tokens which the head reads, in the last block: the CLS token's row, and the
    distillation token's where it has a head; every row where the head averages tokens. With attention pooling it is
    the pooling query's row.

    Args:
        pixels, classes: see `model.explanation.methods.explain`.
    """
    block, read = blocks_of(model)[-1], tokens_read(model.config)
    x = block_inputs(model, pixels, output=model.attn_pool is not None)[-1]
    with torch.no_grad():
        weighed = weigh(block, x, read) if model.attn_pool is None else weigh_pool(model.attn_pool, model.norm(x))
    weights = weighed.weights.requires_grad_()
    with torch.enable_grad():
        if model.attn_pool is None:
            logits, _ = model.read(finish(block, x, Weighed(weights, weighed.values)))
        else:
            logits = finish_pool(model, model.attn_pool, Weighed(weights, weighed.values))
        (gradient,) = torch.autograd.grad(class_scores(logits, classes), weights)
    return over_all_tokens(combine(weights.detach(), gradient), model.config)


def combine(weights: Tensor, gradient: Tensor) -> Tensor:
    """Return the relevance of each token: the positive part of gradient x attention, summed over heads and queries.

    Args:
        weights: attention, float32 [B, heads, Q, N].
        gradient: of the class's logit with respect to it, the same shape.

    Returns:
        float32 [B, N].
    """
    return (weights * gradient).sum(dim=(1, 2)).relu()
