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
    weigh,
    weigh_pool,
)
from model.network.vit import VisionTransformer


def legrad(model: VisionTransformer, pixels: Tensor, classes: Tensor) -> Tensor:
    """Return the relevance of each token for the class: float32 [B, N], not negative.

    As in the authors' code, a layer's prediction reads the mean of all tokens where the model reads the CLS token, and
    the attention of the pooling query takes the place of the block's with attention pooling. Otherwise the model's
    own pooling is applied.

    Args:
        pixels, classes: see `model.explanation.methods.explain`.
    """
    x = block_inputs(model, pixels, output=model.attn_pool is not None)
    found = torch.zeros(x[0].shape[:2], device=x[0].device)
    if model.attn_pool is not None:
        for left in x[1:]:
            with torch.enable_grad():
                weighed = weigh_pool(model.attn_pool, model.norm(left).detach().requires_grad_())
                logits = finish_pool(model, model.attn_pool, weighed)
                (gradient,) = torch.autograd.grad(class_scores(logits, classes), weighed.weights)
            found += over_all_tokens(gradient.relu().mean(dim=(1, 2)), model.config)
        return found
    for block, entering in zip(blocks_of(model), x, strict=True):
        with torch.enable_grad():
            weighed = weigh(block, entering.detach().requires_grad_())
            left = finish(block, entering, weighed)
            if model.config.pool == "cls":  # a second token for the distillation head, where there is one
                left = left.mean(dim=1, keepdim=True).expand(-1, 2, -1)
            logits, _ = model.read(left)
            (gradient,) = torch.autograd.grad(class_scores(logits, classes), weighed.weights)
        found += gradient.relu().mean(dim=(1, 2))
    return found
