"""A forward pass in steps whose attention weights are tensors, so that gradients with respect to
them can be taken.

The network itself computes attention in one fused kernel, which never holds the weights. Here only
one block's weights are alive at a time: the pass through the network keeps each block's input
alone, and a block is computed again from it when its weights are needed.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ViTConfig
from model.network.layers.attention import Attention
from model.network.layers.block import Block
from model.network.vit import AttentionPool, VisionTransformer


class Weighed(NamedTuple):
    """An attention step before it is finished.

    Attributes:
        weights: float32 [B, heads, Q, N], each row a softmax over N tokens.
        values: [B, heads, N, head_dim].
    """

    weights: Tensor
    values: Tensor


def blocks_of(model: VisionTransformer) -> list[Block]:
    """Return the blocks in the network's order."""
    return cast(list[Block], list(model.blocks))


@torch.no_grad()
def block_inputs(model: VisionTransformer, pixels: Tensor, *, output: bool = False) -> list[Tensor]:
    """Return each block's input [B, N, D], without gradients.

    Args:
        pixels: [B, C, H, W], normalised, in the model's dtype.
        output: whether to add the last block's output; else the last block is not computed.
    """
    blocks = blocks_of(model)
    inputs = [model.embed(pixels)]
    for block in blocks if output else blocks[:-1]:
        inputs.append(block(inputs[-1])[0])
    return inputs


def weigh(block: Block, x: Tensor, queries: int | None = None) -> Weighed:
    """Return the attention weights of a block for its first `queries` tokens (None: all), and the
    values.

    Args:
        x: the block's input, [B, N, D].
    """
    attention: Attention = block.attn
    q, k, v = attention.project(block.attention_input(x))
    scores = (q[:, :, :queries] * attention.head_dim**-0.5) @ k.transpose(-2, -1)
    bias = attention.bias()
    if bias is not None:
        scores = scores + bias[:, :, :queries]
    return Weighed(scores.float().softmax(dim=-1), v)


def finish(block: Block, x: Tensor, weighed: Weighed) -> Tensor:
    """Return the block's output for the tokens that `weighed` has rows of: [B, Q, D]."""
    return block.finish(block.attended(x, block.attn.proj(block.attn.norm(mix(weighed)))))


def weigh_pool(pool: AttentionPool, x: Tensor) -> Weighed:
    """Return the pooling query's attention weights of what it looks at, [B, heads, 1, seen], and
    the values.

    Args:
        x: the tokens after the final norm, [B, N, D].
    """
    q, k, v = pool.project(x)
    return Weighed(pool.weights(q, k), v)


def over_all_tokens(seen: Tensor, config: ViTConfig) -> Tensor:
    """Put zeros where the pooling query does not look: [..., seen] -> [..., N]."""
    return F.pad(seen, (config.tokens - seen.shape[-1], 0))


def finish_pool(model: VisionTransformer, pool: AttentionPool, weighed: Weighed) -> Tensor:
    """Return the logits [B, num_classes] of the pooled tokens."""
    pooled = pool.proj(mix(weighed)).squeeze(1)
    return model.classify(model.projected(pooled + pool.mlp(pool.norm(pooled))))


def tokens_read(config: ViTConfig) -> int | None:
    """Return how many of the first tokens the head reads, or None where it pools over all."""
    return 1 + config.distillation_head if config.pool == "cls" else None


def class_scores(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the sum of each image's logit of its class; its gradient is each image's own."""
    return logits.gather(1, classes.unsqueeze(1)).sum()


def mix(weighed: Weighed) -> Tensor:
    """Return the values weighed by the attention, heads joined: [B, Q, D]."""
    mixed = weighed.weights.to(weighed.values.dtype) @ weighed.values
    return mixed.transpose(1, 2).flatten(2)


def readout(config: ViTConfig, x: Tensor) -> Tensor:
    """Return the share of each token in the pooled vector: float32 [B, N], each row summing to 1.

    It is the CLS token, or half of it and half of the distillation token where that has a head;
    with mean and max pooling the mean over the pooled tokens; with `cls_mean` half of each.

    Args:
        x: tokens [B, N, D], for their number and device.
    """
    row = torch.zeros(x.shape[:2], device=x.device)
    pooled = row if config.pool_prefix else row[:, config.prefix_tokens :]
    if config.pool != "cls":
        pooled += (0.5 if config.pool == "cls_mean" else 1.0) / pooled.shape[1]
    if config.pool == "cls_mean":
        row[:, 0] += 0.5
    elif config.pool == "cls":
        read = 1 + config.distillation_head
        row[:, :read] = 1 / read
    return row
