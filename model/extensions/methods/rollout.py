"""Attention rollout (Abnar and Zuidema 2020, https://arxiv.org/abs/2005.00928)."""

import torch
from torch import Tensor

from model.explanation.readout import over_all_tokens, readout, weigh_pool
from model.extensions.methods.explicit_forward import block_inputs, weigh
from model.network.transfer import TransferPart, transfer_parts
from model.network.vit import VisionTransformer, blocks_of
from model.outputs import Pooling


@torch.no_grad()
def rollout(model: VisionTransformer, pixels: Tensor, targets: Tensor, features: Pooling) -> Tensor:
    """Return the share of each input token in the head's input: float32 [B, N], rows sum to 1.

    Each block's matrix is the mean over its attention heads plus the identity for the residual
    connection, with rows scaled to sum to 1. Targets and features have no effect.

    Args:
        pixels: [B, C, H, W], normalised, in the model's dtype.
    """
    inputs = block_inputs(model, pixels, output=model.attn_pool is not None)
    parts: list[TransferPart] = []
    if model.config.pool == "transfer":
        parts = transfer_parts(model.config)
        row = torch.zeros(inputs[0].shape[:2], device=pixels.device)
    elif model.attn_pool is None:
        row = readout(model.config, inputs[0])
    else:
        weighed = weigh_pool(model.attn_pool, model.norm(inputs.pop()))
        row = over_all_tokens(weighed.weights.mean(dim=1).squeeze(1), model.config)
    for index in reversed(range(model.config.depth)):
        for part in parts:
            if part.block == index:
                row = row + part.share(inputs[index], model.config) / len(parts)
        attention = weigh(blocks_of(model)[index], inputs[index]).weights.mean(dim=1)
        row = (row + (row.unsqueeze(1) @ attention).squeeze(1)) / 2
    return row
