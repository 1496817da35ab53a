"""Relevance for a class of a head that reads transfer features: see `model.network.transfer`.

Such a head reads tokens after several blocks. Relevance begins at each of them as it does at what
the checkpoint's own head reads (see `model.explanation.relevance`), and what the parts give a token
adds up.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model.config import ViTConfig
from model.explanation.explicit_forward import blocks_of
from model.explanation.folded_weights import fold_at_block, fold_at_tokens, hops_of
from model.explanation.frozen_gradients import through_norm
from model.explanation.relevance import arriving, start_at_block, start_at_tokens, with_moved
from model.network.vit import VisionTransformer, ViTOutput
from model.outputs import TRANSFER_BLOCKS


class Seed(NamedTuple):
    """A part of the transfer features.

    Attributes:
        block: after which block it is read.
        is_token: whether it is the CLS token, and not the mean of the patches.
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
    """Return how many of the last blocks a forward pass must keep for `transfer_relevance`."""
    return min(config.depth, TRANSFER_BLOCKS + hops_of(config))


@torch.no_grad()
def transfer_relevance(model: VisionTransformer, output: ViTOutput, directions: Tensor) -> Tensor:
    """Return what each token contributed along directions of the transfer features, float32 [B, N].

    The scale of an image's relevance does not matter. Weights are folded for this call: it takes a
    fraction of a pass.

    Args:
        output: of a forward pass that keeps `kept_for_transfer` blocks and all tokens.
        directions: floats [B, `embedding_width` of `transfer`].
    """
    assert output.kept is not None
    config, (kept, tokens) = model.config, output.kept
    first = config.depth - len(kept)
    blocks = blocks_of(model)[first:]
    outputs = [*(of_block.x for of_block in kept[1:]), tokens]
    relevance = torch.zeros(tokens.shape[:2], device=tokens.device)
    for seed, direction in zip(
        seeds_of(config), torch.split(directions.float(), config.width, dim=1), strict=True
    ):
        count = seed.block - first + 1
        gradient = _gradient(model, seed, outputs[count - 1], direction)
        through, of_blocks = blocks[:count], kept[:count]
        if seed.is_token:
            weights = fold_at_block(model, through)
            start = start_at_block(weights, through[-1], of_blocks[-1], gradient[:, :1])
            found = with_moved(config, weights, through[:-1], of_blocks[:-1], start)
        else:
            weights = fold_at_tokens(model, through)
            start = start_at_tokens(outputs[count - 1], gradient)
            found = with_moved(config, weights, through, of_blocks, start)
        if weights.smoothing is not None:
            last = slice(-hops_of(config) - 1, None)
            share = seed.share(tokens, config)
            found = (found @ weights.smoothing) * arriving(
                share, through[last], of_blocks[last]
            ).sqrt()
        relevance += found
    return relevance


def _gradient(model: VisionTransformer, seed: Seed, x: Tensor, direction: Tensor) -> Tensor:
    """Return the gradient along a direction [B, D] of a part with respect to the tokens x that it
    is read from.
    """
    share = seed.share(x, model.config).unsqueeze(2)
    pooled = (model.norm(x).float() * share).sum(dim=1)
    to_pooled = through_norm(model.fc_norm, pooled, direction).unsqueeze(1)
    return through_norm(model.norm, x, to_pooled * share)
