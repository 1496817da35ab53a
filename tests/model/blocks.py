"""The encoder blocks of a model with their type, which `nn.ModuleList` loses."""

from model.network.layers.block import Block
from model.network.vit import VisionTransformer


def blocks(model: VisionTransformer) -> list[Block]:
    """Return the blocks of `model`, the first one first."""
    found = [block for block in model.blocks if isinstance(block, Block)]
    assert len(found) == model.config.depth
    return found
