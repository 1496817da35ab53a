"""LeGrad (Bousselham et al., ICCV 2025, https://arxiv.org/abs/2404.03214): gradients of each layer's own prediction.

Each block's output is read by the model's head as if it were the last one's. The positive part of that prediction's
gradient with respect to the block's attention, averaged over heads and queries, is the layer's map; layers are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.explanation.explicit_forward import (
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
from model.network.layers.block import Block
from model.network.vit import VisionTransformer


def legrad(model: VisionTransformer, pixels: Tensor, classes: Tensor) -> Tensor:
    """Return the relevance of each token for the class: float32 [B, N], not negative.

    A layer's prediction is pooled as the model's is; the authors' code for CLIP averages all tokens instead of reading
    the CLS token, which a head that was trained on that token alone makes less of. With attention pooling the pooling
    query's attention takes the place of the block's, as in their code.

    Args:
        pixels, classes: see `model.explanation.methods.explain`.
    """
    inputs = block_inputs(model, pixels)
    found = torch.zeros(inputs[0].shape[:2], device=pixels.device)
    for block, x in zip(blocks_of(model), inputs, strict=True):
        _, gradient = head_gradient(model, block, x, classes)
        found += gradient.relu().mean(dim=(1, 2))
    return found


def head_gradient(
    model: VisionTransformer,
    block: Block,
    x: Tensor,
    classes: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return attention weights and the gradient of the class's logit with respect to them, each [B, heads, Q, N].

    The head reads few tokens, in most models the CLS token alone. This gradient therefore needs a backward pass through
    these tokens' projection, MLP and norms, and not through the network.

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
