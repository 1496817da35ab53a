"""The encoder blocks of a model, which `nn.ModuleList` hands out as modules of no certain type."""

from model.network.layers.block import Block
from model.network.vit import VisionTransformer


def blocks(model: VisionTransformer) -> list[Block]:
    """Return the blocks of `model`, the first one first."""
    found = [block for block in model.blocks if isinstance(block, Block)]
    assert len(found) == model.config.depth
    return found
