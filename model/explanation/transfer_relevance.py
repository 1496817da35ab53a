"""Relevance for a class of a head that reads transfer features (`model.network.transfer`).

Such a head reads tokens after several blocks. At each of these, relevance begins as it does for the
checkpoint's own head (see `model.explanation.relevance`). The relevance of a token is the sum over
the parts of the features.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model.config import ViTConfig
from model.explanation.folded_weights import fold_at_block, fold_at_tokens, hops_of
from model.explanation.frozen_gradients import through_norm
from model.explanation.relevance import arriving, start_at_block, start_at_tokens, with_moved
from model.network.layers.block import Block, Kept
from model.network.vit import VisionTransformer, ViTOutput, blocks_of
from model.outputs import TRANSFER_BLOCKS


class Seed(NamedTuple):
    """A part of the transfer features.

    Attributes:
        block: index of the block whose output the part is read from.
        is_token: whether the part is the CLS token; if not, it is the mean of the patches.
    """

    block: int
    is_token: bool

    def share(self, x: Tensor, config: ViTConfig) -> Tensor:
        """Return the share of each token x [B, N, D] in this part, float32 [B, N]."""
        row = torch.zeros(x.shape[:2], device=x.device)
        if self.is_token:
            row[:, 0] = 1
        else:
            row[:, config.prefix_tokens :] = 1 / (x.shape[1] - config.prefix_tokens)
        return row


def seeds_of(config: ViTConfig) -> list[Seed]:
    """Return the parts of the transfer features in their order."""
    read = range(config.depth)[-TRANSFER_BLOCKS:]
    seeds = [Seed(block, config.class_token) for block in read]
    return [*seeds, Seed(config.depth - 1, False)] if config.class_token else seeds


def kept_for_transfer(config: ViTConfig) -> int:
    """Return the number of last blocks that a forward pass must keep for `transfer_relevance`."""
    return min(config.depth, TRANSFER_BLOCKS + hops_of(config))


@torch.no_grad()
def transfer_relevance(model: VisionTransformer, output: ViTOutput, directions: Tensor) -> Tensor:
    """Return each token's contribution along directions of the transfer features, float32 [B, N].

    The scale of an image's relevance does not matter. Weights are folded in this call, which takes
    a fraction of a pass.

    Args:
        output: of a forward pass that keeps `kept_for_transfer` blocks and all tokens.
        directions: floats [B, `embedding_width` of `transfer`].
    """
    assert output.kept is not None
    config = model.config
    kept, tokens = output.kept
    first = config.depth - len(kept)
    blocks = blocks_of(model)[first:]
    outputs = [*(kept_block.x for kept_block in kept[1:]), tokens]
    by_part = torch.split(directions.float(), config.width, dim=1)
    relevance = torch.zeros(tokens.shape[:2], device=tokens.device)
    for seed, direction in zip(seeds_of(config), by_part, strict=True):
        count = seed.block - first + 1
        x = outputs[count - 1]
        gradient = _gradient(model, seed, x, direction)
        relevance += _of_part(model, seed, blocks[:count], kept[:count], x, gradient)
    return relevance


def _of_part(
    model: VisionTransformer,
    seed: Seed,
    blocks: list[Block],
    kept: list[Kept],
    x: Tensor,
    gradient: Tensor,
) -> Tensor:
    """Return the relevance of each token for one part, float32 [B, N].

    Args:
        blocks, kept: up to the block that the part is read from.
        x: output of that block, [B, N, D].
        gradient: for `x`.
    """
    config = model.config
    if seed.is_token:
        weights = fold_at_block(model, blocks)
        start = start_at_block(weights, blocks[-1], kept[-1], gradient[:, :1])
        relevance = with_moved(config, weights, blocks[:-1], kept[:-1], start)
    else:
        weights = fold_at_tokens(model, blocks)
        relevance = with_moved(config, weights, blocks, kept, start_at_tokens(x, gradient))
    if weights.smoothing is None:
        return relevance
    last = slice(-hops_of(config) - 1, None)
    arrived = arriving(seed.share(kept[-1].x, config), blocks[last], kept[last])
    return (relevance @ weights.smoothing) * arrived.sqrt()


def _gradient(model: VisionTransformer, seed: Seed, x: Tensor, direction: Tensor) -> Tensor:
    """Return the gradient of a part along a direction [B, D] for the tokens x [B, N, D]."""
    share = seed.share(x, model.config).unsqueeze(2)
    pooled = (model.norm(x).float() * share).sum(dim=1)
    to_pooled = through_norm(model.fc_norm, pooled, direction).unsqueeze(1)
    return through_norm(model.norm, x, to_pooled * share)
