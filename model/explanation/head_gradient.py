"""The gradient of a class's logit with respect to the attention that the head's token was made with.

The head reads few tokens, in most models the CLS token alone. This gradient therefore needs a backward pass through
these tokens' projection, MLP and norms, and not through the network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.explanation.explicit_forward import (
    class_scores,
    finish,
    finish_pool,
    over_all_tokens,
    tokens_read,
    weigh,
    weigh_pool,
)
from model.network.layers.block import Block
from model.network.vit import VisionTransformer


def head_gradient(
    model: VisionTransformer,
    block: Block,
    x: Tensor,
    classes: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return attention weights and the gradient of the class's logit with respect to them, each [B, heads, Q, N].

    The Q queries are the tokens that the head reads: CLS, and the distillation token where it has a head; all where
    the head pools over tokens. With attention pooling it is the pooling query alone, after the block.

    Args:
        block: the block whose output the head reads, as if it were the last one.
        x: the block's input, [B, N, D].
        classes: int64 [B].
    """
    pool = model.attn_pool
    with torch.no_grad():
        if pool is None:
            weighed = weigh(block, x, tokens_read(model.config))
        else:
            weighed = weigh_pool(pool, model.norm(block(x)[0]))
    with torch.enable_grad():
        weighed.weights.requires_grad_()
        if pool is None:
            logits, _ = model.read(finish(block, x, weighed))
        else:
            logits = finish_pool(model, pool, weighed)
        (gradient,) = torch.autograd.grad(class_scores(logits, classes), weighed.weights)
    weights, config = weighed.weights.detach(), model.config
    return over_all_tokens(weights, config), over_all_tokens(gradient, config)
