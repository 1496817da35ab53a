"""Relevance of each token for a class: gradients of its margin, for each way of reading tokens.

`model.explanation.relevance` takes over where the head reads the tokens. A head that reads transfer
features (`model.network.transfer`) reads tokens after several blocks. Relevance then begins at each
of these, and the relevance of a token is the sum over the parts of the features.
"""

import torch
from torch import Tensor, nn

from model.config import ViTConfig
from model.explanation.folded_weights import (
    FoldedWeights,
    ReadoutWeights,
    fold,
    heads_of,
    hops_of,
)
from model.explanation.frozen_gradients import (
    through_linear,
    through_mlp,
    through_norm,
    through_norm_unscaled,
    through_pooling,
    with_rivals,
)
from model.explanation.readout import mix, over_all_tokens, readout, weigh_pool
from model.explanation.relevance import relevance_of_tokens
from model.network.transfer import transfer_parts
from model.network.vit import AttentionPool, VisionTransformer, ViTOutput, blocks_of
from model.outputs import TRANSFER_BLOCKS


def kept_for_class(config: ViTConfig) -> int:
    """Return the number of last blocks that a forward pass must keep for `class_relevance`."""
    return kept_for_transfer(config) if config.pool == "transfer" else hops_of(config) + 1


def kept_for_transfer(config: ViTConfig) -> int:
    """Return the number of last blocks that a forward pass must keep for `transfer_relevance`."""
    return min(config.depth, TRANSFER_BLOCKS + hops_of(config))


def class_relevance(
    model: VisionTransformer,
    output: ViTOutput,
    folded: FoldedWeights,
    targets: Tensor | None = None,
) -> Tensor:
    """Return each token's contribution to the class's margin, may be negative: float32 [B, N].

    The scale of an image's relevance does not matter.

    Args:
        output: of a forward pass that keeps at least `kept_for_class` blocks.
        folded: `fold` of the model.
        targets: classes, int64 [B]; None takes the best class of each image. Or directions, floats
            [B, `embedding_width`], each a class's row of another head minus the mean of its rivals'
            rows.
    """
    if targets is not None and targets.is_floating_point():
        directions = targets.unsqueeze(1)
    else:
        ranked = with_rivals(output.logits, targets, len(folded.margin))
        rows = [_margin_direction(head, ranked, folded) for head in heads_of(model)]
        directions = torch.stack(rows, dim=1)
    if model.config.pool == "transfer":
        return transfer_relevance(model, output, directions[:, 0], folded)
    assert output.kept is not None
    kept = output.kept.blocks[-kept_for_class(model.config) :]
    tokens = output.kept.tokens
    passed = list(zip(blocks_of(model)[-len(kept) :], kept, strict=True))
    [weights] = folded.readouts
    gradient = _gradient_for_tokens(model, weights, tokens, directions)
    share = None if folded.smoothing is None else readout(model.config, kept[-1].x)
    return relevance_of_tokens(weights, folded.smoothing, passed, tokens, gradient, share)


@torch.no_grad()
def transfer_relevance(
    model: VisionTransformer,
    output: ViTOutput,
    directions: Tensor,
    folded: FoldedWeights | None = None,
) -> Tensor:
    """Return each token's contribution along directions of the transfer features, float32 [B, N].

    The scale of an image's relevance does not matter.

    Args:
        output: of a forward pass that keeps `kept_for_transfer` blocks and all tokens.
        directions: floats [B, `embedding_width` of `transfer`].
        folded: `fold` of the model for transfer features. Without it, the weights are folded in
            this call, which takes a fraction of a pass.
    """
    assert output.kept is not None
    config = model.config
    folded = folded or fold(model, transfer=True)
    kept, tokens = output.kept
    first = config.depth - len(kept)
    passed = list(zip(blocks_of(model)[first:], kept, strict=True))
    outputs = [*(kept_block.x for kept_block in kept[1:]), tokens]
    by_part = torch.split(directions.float(), config.width, dim=1)
    relevance = torch.zeros(tokens.shape[:2], device=tokens.device)
    for part, direction, weights in zip(
        transfer_parts(config), by_part, folded.readouts, strict=True
    ):
        index = part.block - first
        x = outputs[index]
        share = part.share(x, config)
        gradient = _gradient_of_part(model, x, share, direction)
        if part.is_token:
            gradient = gradient[:, :1]
        last = passed[: index + 1][-hops_of(config) - 1 :]
        relevance += relevance_of_tokens(weights, folded.smoothing, last, x, gradient, share)
    return relevance


def _gradient_of_part(
    model: VisionTransformer, x: Tensor, share: Tensor, direction: Tensor
) -> Tensor:
    """Return the gradient of a part along a direction [B, D] for the tokens x [B, N, D].

    Args:
        share: share of each token in the part, float32 [B, N].
    """
    shares = share.unsqueeze(2)
    pooled = (model.norm(x).float() * shares).sum(dim=1)
    to_pooled = through_norm(model.fc_norm, pooled, direction).unsqueeze(1)
    return through_norm(model.norm, x, to_pooled * shares)


def _margin_direction(head: nn.Linear, ranked: Tensor, folded: FoldedWeights) -> Tensor:
    """Return the direction in which a class's margin in a head rises, float32 [B, D].

    The margin is the logit of the class minus the mean logit of its rivals. The logit alone also
    rises with features that all likely classes share, such as the features of any animal. The
    difference to the strongest rivals cancels such features.

    Args:
        ranked: see `with_rivals`.
    """
    return (nn.functional.embedding(ranked, head.weight) * folded.margin).sum(dim=1)


def _gradient_for_tokens(
    model: VisionTransformer, weights: ReadoutWeights, x: Tensor, directions: Tensor
) -> Tensor:
    """Return the gradient for the tokens that the head reads, float32 [B, read or N, D].

    A scale per image has no effect. It is left out for an L2 norm before the head, for the norm of
    a pooled vector, and for the norm of a single token.

    Args:
        weights: folded for the head.
        x: output of the last block, [B, N, D], or only the tokens that the head reads.
        directions: directions in the head's input, one per head, [B, heads, `embedding_width`].
    """
    gradient = directions
    if isinstance(model.projection, nn.Linear):
        gradient = through_linear(model.projection, gradient)
    gradient = through_norm_unscaled(model.fc_norm, gradient)
    if model.config.pool == "cls":
        read = gradient.shape[1]
        if read == 1:
            return through_norm_unscaled(model.norm, gradient)
        return through_norm(model.norm, x[:, :read], gradient)
    if model.attn_pool is not None:
        assert weights.last is not None
        normed = model.norm(x)
        gradient = _through_attention_pool(model.attn_pool, weights.last, normed, gradient)
        gradient = over_all_tokens(gradient.transpose(1, 2), model.config).transpose(1, 2)
    else:
        gradient = through_pooling(model.norm(x), gradient, model.config)
    return through_norm(model.norm, x, gradient)


def _through_attention_pool(
    pool: AttentionPool, last: Tensor, x: Tensor, gradient: Tensor
) -> Tensor:
    """Return the gradient for the tokens that the pooling query looked at, [B, seen, D].

    Args:
        last: see `ReadoutWeights`.
        x: tokens after the final norm, [B, N, D].
        gradient: for the pooled vector, float32 [B, 1, D].
    """
    weighed = weigh_pool(pool, x)
    pooled = pool.proj(mix(weighed))
    to_mlp = through_mlp(pool.mlp, pool.mlp.fc1(pool.norm(pooled)), gradient)
    gradient = gradient + through_norm(pool.norm, pooled, to_mlp)
    to_heads = nn.functional.linear(gradient.to(last.dtype), last).float()
    to_heads = to_heads.reshape(*to_heads.shape[:2], -1, pool.head_dim)
    to_values = (weighed.weights.transpose(-2, -1) @ to_heads.transpose(1, 2)).transpose(1, 2)
    return through_linear(pool.kv, to_values.flatten(2), slice(x.shape[2], None))
