"""A forward pass in steps with attention weights as tensors, so that they can have gradients.

The network computes attention in one fused kernel, which never stores the weights. Here, only one
block's weights are alive at a time. The pass through the network keeps each block's input, and a
block is computed again from its input when its weights are needed.
"""

import torch
from torch import Tensor

from model.explanation.readout import Weighed, mix
from model.network.layers.block import Block
from model.network.vit import VisionTransformer, blocks_of


@torch.no_grad()
def block_inputs(model: VisionTransformer, pixels: Tensor, *, output: bool = False) -> list[Tensor]:
    """Return each block's input [B, N, D], without gradients.

    Args:
        pixels: [B, C, H, W], normalised, in the model's dtype.
        output: whether to add the last block's output; if not, the last block is not computed.
    """
    blocks = blocks_of(model)
    inputs = [model.embed(pixels)]
    for block in blocks if output else blocks[:-1]:
        inputs.append(block(inputs[-1])[0])
    return inputs


def weigh(block: Block, x: Tensor) -> Weighed:
    """Return the attention weights and the values of a block, from its input [B, N, D]."""
    q, k, v = block.attn.project(block.attention_input(x))
    scores = (q * block.attn.head_dim**-0.5) @ k.transpose(-2, -1)
    bias = block.attn.bias()
    if bias is not None:
        scores = scores + bias
    return Weighed(scores.float().softmax(dim=-1), v)


def finish(block: Block, x: Tensor, weighed: Weighed) -> Tensor:
    """Return the block's output [B, N, D], from its input and its attention."""
    return block.finish(block.attended(x, block.attn.proj(block.attn.norm(mix(weighed)))))
