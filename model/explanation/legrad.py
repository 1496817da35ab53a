"""LeGrad (Bousselham et al., ICCV 2025, https://arxiv.org/abs/2404.03214): gradients of each layer's own prediction.

Each block's output is read by the model's head as if it were the last one's. The positive part of that prediction's
gradient with respect to the block's attention, averaged over heads and queries, is the layer's map; layers are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.explanation.explicit_forward import block_inputs, blocks_of
from model.explanation.head_gradient import head_gradient
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
