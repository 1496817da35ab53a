"""Generic attention explainability (Chefer, Gur and Wolf, ICCV 2021, https://arxiv.org/abs/2103.15679).

Attention weighed by its gradient is followed through all blocks: R = I, then R += A R in each block, where A is the
mean over the heads of the positive part of gradient x attention. A map needs one row of R, and R is the product of all
(I + A), so the row is multiplied from the last block to the first: in the order of the backward pass, and without R.
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
    readout,
    weigh,
    weigh_pool,
)
from model.network.vit import VisionTransformer


def gae(model: VisionTransformer, pixels: Tensor, classes: Tensor) -> Tensor:
    """Return the relevance of each token for the class: float32 [B, N], not negative.

    The row is the CLS token's, or the mean over the rows of the tokens that the head reads (see `readout`). With
    attention pooling it begins as the pooling query's own row.

    Args:
        pixels, classes: see `model.explanation.methods.explain`.
    """
    x = block_inputs(model, pixels, output=True)
    row, gradient = _start(model, x.pop(), classes)
    for block, entering in zip(reversed(blocks_of(model)), reversed(x), strict=True):
        with torch.enable_grad():
            leaf = entering.detach().requires_grad_()
            weighed = weigh(block, leaf)
            left = finish(block, leaf, weighed)
            to_weights, gradient = torch.autograd.grad(left, (weighed.weights, leaf), gradient)
        row = row + (row.unsqueeze(1) @ _fused(weighed.weights.detach(), to_weights)).squeeze(1)
    return row


def _start(model: VisionTransformer, x: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row to begin with, float32 [B, N], and the logit's gradient with respect to the tokens x [B, N, D]."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        if model.attn_pool is None:
            logits, _ = model.read(leaf)
            (gradient,) = torch.autograd.grad(class_scores(logits, classes), leaf)
            return readout(model.config, x), gradient
        weighed = weigh_pool(model.attn_pool, model.norm(leaf))
        logits = finish_pool(model, model.attn_pool, weighed)
        to_weights, gradient = torch.autograd.grad(class_scores(logits, classes), (weighed.weights, leaf))
    row = _fused(weighed.weights.detach(), to_weights).squeeze(1)
    return over_all_tokens(row, model.config), gradient


def _fused(weights: Tensor, gradient: Tensor) -> Tensor:
    """Return the mean over the heads of the positive part of gradient x attention: [B, heads, Q, N] -> [B, Q, N]."""
    return (weights * gradient).relu().mean(dim=1)
