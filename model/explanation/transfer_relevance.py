"""Relevance for a class of a head that reads transfer features (`model.network.transfer`).

Such a head reads tokens after several blocks. At each of these, relevance begins as it does for the
checkpoint's own head (see `model.explanation.relevance`). The relevance of a token is the sum over
the parts of the features.
"""

import torch
from torch import Tensor

from model.config import ViTConfig
from model.explanation.folded_weights import FoldedWeights, fold_parts, hops_of
from model.explanation.frozen_gradients import through_norm, with_rivals
from model.explanation.relevance import (
    arriving,
    kept_blocks,
    margin_direction,
    start_at_block,
    start_at_tokens,
    token_relevance,
    with_moved,
)
from model.network.layers.block import Block, Kept
from model.network.transfer import TransferPart, transfer_parts
from model.network.vit import VisionTransformer, ViTOutput, blocks_of
from model.outputs import TRANSFER_BLOCKS


def kept_for_transfer(config: ViTConfig) -> int:
    """Return the number of last blocks that a forward pass must keep for `transfer_relevance`."""
    return min(config.depth, TRANSFER_BLOCKS + hops_of(config))


def kept_for_class(config: ViTConfig) -> int:
    """Return the number of last blocks that a forward pass must keep for `class_relevance`."""
    return kept_for_transfer(config) if config.pool == "transfer" else kept_blocks(config)


def class_relevance(
    model: VisionTransformer,
    output: ViTOutput,
    weights: FoldedWeights,
    targets: Tensor | None = None,
) -> Tensor:
    """Return each token's contribution to a class of the model's head, float32 [B, N].

    This is `token_relevance`, or `transfer_relevance` if the head reads transfer features.

    Args:
        output: of a forward pass that keeps `kept_for_class` blocks.
        weights, targets: see `token_relevance`.
    """
    if model.config.pool != "transfer":
        return token_relevance(model, output, weights, targets)
    if targets is None or not targets.is_floating_point():
        ranked = with_rivals(output.logits, targets, len(weights.margin))
        targets = margin_direction(model.head, ranked, weights)
    return transfer_relevance(model, output, targets, weights.parts)


@torch.no_grad()
def transfer_relevance(
    model: VisionTransformer,
    output: ViTOutput,
    directions: Tensor,
    folded: tuple[FoldedWeights, ...] = (),
) -> Tensor:
    """Return each token's contribution along directions of the transfer features, float32 [B, N].

    The scale of an image's relevance does not matter.

    Args:
        output: of a forward pass that keeps `kept_for_transfer` blocks and all tokens.
        directions: floats [B, `embedding_width` of `transfer`].
        folded: `fold_parts` of the model. Without it, the weights are folded in this call, which
            takes a fraction of a pass.
    """
    assert output.kept is not None
    config = model.config
    kept, tokens = output.kept
    first = config.depth - len(kept)
    blocks = blocks_of(model)[first:]
    outputs = [*(kept_block.x for kept_block in kept[1:]), tokens]
    by_part = torch.split(directions.float(), config.width, dim=1)
    relevance = torch.zeros(tokens.shape[:2], device=tokens.device)
    for part, direction, weights in zip(
        transfer_parts(config), by_part, folded or fold_parts(model), strict=True
    ):
        count = part.block - first + 1
        x = outputs[count - 1]
        gradient = _gradient(model, part, x, direction)
        relevance += _of_part(config, part, weights, blocks[:count], kept[:count], x, gradient)
    return relevance


def _of_part(
    config: ViTConfig,
    part: TransferPart,
    weights: FoldedWeights,
    blocks: list[Block],
    kept: list[Kept],
    x: Tensor,
    gradient: Tensor,
) -> Tensor:
    """Return the relevance of each token for one part, float32 [B, N].

    Args:
        weights: folded for this part.
        blocks, kept: up to the block that the part is read from.
        x: output of that block, [B, N, D].
        gradient: for `x`.
    """
    if part.is_token:
        start = start_at_block(weights, blocks[-1], kept[-1], gradient[:, :1])
        relevance = with_moved(config, weights, blocks[:-1], kept[:-1], start)
    else:
        relevance = with_moved(config, weights, blocks, kept, start_at_tokens(x, gradient))
    if weights.smoothing is None:
        return relevance
    last = slice(-hops_of(config) - 1, None)
    arrived = arriving(part.share(kept[-1].x, config), blocks[last], kept[last])
    return (relevance @ weights.smoothing) * arrived.sqrt()


def _gradient(model: VisionTransformer, part: TransferPart, x: Tensor, direction: Tensor) -> Tensor:
    """Return the gradient of a part along a direction [B, D] for the tokens x [B, N, D]."""
    share = part.share(x, model.config).unsqueeze(2)
    pooled = (model.norm(x).float() * share).sum(dim=1)
    to_pooled = through_norm(model.fc_norm, pooled, direction).unsqueeze(1)
    return through_norm(model.norm, x, to_pooled * share)
