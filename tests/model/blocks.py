"""Models with weights, and their encoder blocks, which `nn.ModuleList` hands out as modules of no certain type."""

from __future__ import annotations

import torch

from model.config import ViTConfig
from model.network.layers.block import Block
from model.network.vit import VisionTransformer


def blocks(model: VisionTransformer) -> list[Block]:
    """Return the blocks of `model`, the first one first."""
    found = [block for block in model.blocks if isinstance(block, Block)]
    assert len(found) == model.config.depth
    return found


@torch.no_grad()
def drawn_model(config: ViTConfig) -> VisionTransformer:
    """Return a model with weights that are always the same: matrices are drawn, norms are one, biases and head zero."""
    model, generator = VisionTransformer(config), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name == "pos_embed" and config.position_embedding == "sincos2d":
            parameter.copy_(model.fixed_position_embedding())
        elif parameter.ndim == 1:
            parameter.fill_(1e-5 if name.endswith("gamma") else float("norm" in name and name.endswith("weight")))
        elif name in ("head.weight", "head_dist.weight"):
            parameter.zero_()
        else:
            torch.nn.init.trunc_normal_(parameter, std=0.02, generator=generator)
    return model
