"""Relevance: what each patch brought to a class's margin over its rivals, at little more than a
forward pass's cost.

Gradients are taken with the scales held constant (see `model.explanation.frozen_gradients`), in two
steps.

1. The head reads few tokens, in most models the CLS token alone. A token's relevance is the last block's attention to
   it times the gradient with respect to that attention. It needs no pass through the network. Where
   the head reads all tokens, it is gradient x input of these.
2. A token's features come in part from others, by the attention of the blocks before. What the strongest tokens have
   from there is moved to where it was taken, attention times gradient again: two blocks back, along
   the residual connections, past the MLPs.

On a coarse grid a token has seen more than its patch. There it is three blocks, and the relevance
is smoothed and counts by the root of how much of a token arrives at what the head reads: its
square, which a map shows, then counts by that.
"""

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from model.config import ViTConfig
from model.explanation.explicit_forward import blocks_of, mix, over_all_tokens, readout, weigh_pool
from model.explanation.folded_weights import FoldedWeights, heads_of, hops_of
from model.explanation.frozen_gradients import (
    inverse_deviation,
    is_traced,
    through_linear,
    through_mlp,
    through_norm,
    through_norm_unscaled,
    through_pooling,
    through_scale,
    with_rivals,
)
from model.network.layers.attention import Attention
from model.network.layers.block import Block, Kept
from model.network.vit import AttentionPool, VisionTransformer, ViTOutput

_STRONGEST: Final = 16


class Start(NamedTuple):
    """The relevance of all tokens, and the strongest of them with their gradients.

    Attributes:
        relevance: [B, N].
        strongest: the places of the strongest tokens, int64 [B, S].
        rows: the same places in a matrix of all images' tokens, [B N, ...].
        gradient: with respect to them, [B, S, D].
    """

    relevance: Tensor
    strongest: Tensor
    rows: Tensor
    gradient: Tensor


def kept_blocks(config: ViTConfig) -> int:
    """Return how many of the last blocks a forward pass must keep for `token_relevance`."""
    return hops_of(config) + 1


def token_relevance(
    model: VisionTransformer,
    output: ViTOutput,
    weights: FoldedWeights,
    targets: Tensor | None = None,
) -> Tensor:
    """Return what each token contributed to the class's margin, negative where it spoke against:
    float32 [B, N].

    The scale of an image's relevance does not matter.

    Args:
        output: of a forward pass that keeps `kept_blocks`.
        targets: classes, int64 [B]; None is the best of each image. Or directions, floats [B,
            `embedding_width`]: what takes the place of a class's row of the one head less the mean
            of its rivals'.
        weights: `fold` of the model.
    """
    assert output.kept is not None
    if targets is not None and targets.is_floating_point():
        directions = [targets]
    else:
        ranked = with_rivals(output.logits, targets, len(weights.margin))
        directions = [_direction(head, ranked, weights) for head in heads_of(model)]
    margins = _margins(model, directions)
    kept, tokens = output.kept
    blocks = blocks_of(model)[-len(kept) :]
    relevance = _of_tokens(model, blocks, kept, tokens, weights, margins)
    if weights.smoothing is None:
        return relevance
    read = readout(model.config, kept[-1].x)
    return (relevance @ weights.smoothing) * arriving(read, blocks, kept).sqrt()


def _of_tokens(
    model: VisionTransformer,
    blocks: list[Block],
    kept: list[Kept],
    tokens: Tensor,
    weights: FoldedWeights,
    margins: Tensor,
) -> Tensor:
    """Return the relevance of each token by the blocks that were kept, [B, N]; for `margins` see
    `_margins`.
    """
    if model.config.pool == "cls":
        read, gradient = margins.shape[1], margins
        # One token's scale does not matter, as all relevance goes through it; of two it decides
        # between them.
        if read > 1 and isinstance(model.norm, nn.LayerNorm):
            gradient = gradient * inverse_deviation(model.norm, tokens[:, :read])
        start = start_at_block(weights, blocks[-1], kept[-1], gradient)
        blocks, kept = blocks[:-1], kept[:-1]
    elif model.attn_pool is not None:
        assert weights.last is not None
        start = _start_at_pool(model, weights.last, model.attn_pool, tokens, margins)
    else:
        to_tokens = through_pooling(model.norm(tokens), margins, model.config)
        start = start_at_tokens(tokens, through_norm(model.norm, tokens, to_tokens))
    return with_moved(model.config, weights, blocks, kept, start)


def with_moved(
    config: ViTConfig, weights: FoldedWeights, blocks: list[Block], kept: list[Kept], start: Start
) -> Tensor:
    """Return the relevance of each token once it is moved through the last of these blocks, float32
    [B, N].
    """
    hops = list(zip(blocks, kept, strict=True))[: -hops_of(config) - 1 : -1]
    if not hops:
        return start.relevance
    moved = _moved(
        weights.hops, [block.attn for block, _ in hops], [of_block for _, of_block in hops], start
    )
    return (start.relevance + moved.sum(dim=1)).scatter_add(1, start.strongest, -moved.sum(dim=2))


def arriving(row: Tensor, blocks: list[Block], kept: list[Kept]) -> Tensor:
    """Return how much of each token arrives through these blocks at what is read, float32 [B, N].

    It is the rollout of `model.explanation.methods`, but no further back.

    Args:
        row: share of each token of the last block's output in what is read, float32 [B, N].
    """
    for block, of_block in zip(reversed(blocks), reversed(kept), strict=True):
        bias, queries = block.attn.bias(), of_block.q.shape[2]
        attention = _softmax(
            block.attn, of_block.q, of_block.k, None if bias is None else bias[:, :, :queries]
        )
        row = (row + (row[:, :queries].unsqueeze(1) @ attention.float().mean(dim=1)).squeeze(1)) / 2
    return row


def start_at_block(weights: FoldedWeights, block: Block, kept: Kept, gradient: Tensor) -> Start:
    """Go back from the first tokens of a block's output through the block, whose input has the
    relevance.

    Args:
        weights: `last` and `values` are of this block.
        gradient: with respect to these tokens, float32 [B, read, D].
    """
    assert weights.last is not None
    assert weights.values is not None
    attention, read, bias = block.attn, int(gradient.shape[1]), block.attn.bias()
    attended, hidden = kept.attended[:, :read], kept.hidden
    hidden = block.mlp.fc1(block.norm2(attended)) if hidden is None else hidden[:, :read]
    to_mlp = through_mlp(block.mlp, hidden, through_scale(block.ls2, gradient))
    gradient = gradient + through_norm(block.norm2, attended, to_mlp)
    rows = _softmax(
        attention, kept.q[:, :, :read], kept.k, None if bias is None else bias[:, :, :read]
    )
    to_heads = nn.functional.linear(gradient.to(weights.last.dtype), weights.last)
    to_heads = _through_norm_of_heads(attention, to_heads, rows, kept.v)
    given = rows * (to_heads @ kept.v.transpose(-2, -1))  # [B, heads, read, N]
    own = _dot(gradient, kept.x[:, :read].float())
    of_tokens = given.sum(dim=(1, 2), dtype=torch.float32) + nn.functional.pad(
        own, (0, int(kept.x.shape[1]) - read)
    )
    strongest, places = _strongest(of_tokens)
    shares = _at(rows.flatten(1, 2).transpose(1, 2), places)  # [B, S, heads read]
    if isinstance(block.norm1, nn.LayerNorm):
        shares = shares * inverse_deviation(block.norm1, _at(kept.x, places)).to(shares.dtype)
    to_values = to_heads.transpose(0, 1).flatten(1, 2) @ weights.values  # [heads, B read, D]
    to_values = (
        to_values.reshape(attention.heads, -1, read, to_values.shape[2])
        .transpose(0, 1)
        .flatten(1, 2)
    )
    is_read = strongest.unsqueeze(2) == torch.arange(read, device=strongest.device)
    shares = torch.cat((shares, is_read.to(shares.dtype)), dim=2)
    onward = shares @ torch.cat((to_values, gradient.to(to_values.dtype)), dim=1)
    return Start(of_tokens, strongest, places, onward)


def _direction(head: nn.Linear, ranked: Tensor, weights: FoldedWeights) -> Tensor:
    """Return what a class's margin in a head rises with, float32 [B, D].

    The margin is the logit of the class less the mean of its rivals'. The logit alone also rises
    with what all likely classes have in common, an animal or a vehicle of any kind; against the
    mean of the strongest rivals this cancels out.

    Args:
        ranked: see `with_rivals`.
    """
    return (nn.functional.embedding(ranked, head.weight) * weights.margin).sum(dim=1)


def _margins(model: VisionTransformer, directions: list[Tensor]) -> Tensor:
    """Return the gradient of a class's margin with respect to what each head reads, [B, heads of
    the model, D or 2 D].

    What a head reads is what enters the norm before it, but for the scale of each token.

    Args:
        directions: of the margin in each head, [B, D].
    """
    joined = torch.stack(directions, dim=1) if len(directions) > 1 else directions[0].unsqueeze(1)
    if isinstance(
        model.projection, nn.Linear
    ):  # of an L2 norm before the head the scale does not matter
        joined = through_linear(model.projection, joined)
    joined = through_norm_unscaled(model.fc_norm, joined)
    return through_norm_unscaled(model.norm, joined) if model.config.pool == "cls" else joined


def _start_at_pool(
    model: VisionTransformer, folded: Tensor, pool: AttentionPool, x: Tensor, margins: Tensor
) -> Start:
    """Go back from the pooling query's vector to the tokens that it looked at."""
    weighed = weigh_pool(pool, model.norm(x))
    pooled = pool.proj(mix(weighed))
    to_mlp = through_mlp(pool.mlp, pool.mlp.fc1(pool.norm(pooled)), margins)
    gradient = margins + through_norm(pool.norm, pooled, to_mlp)
    to_heads = _by_head(
        nn.functional.linear(gradient.to(folded.dtype), folded).float(), pool.head_dim
    )
    to_values = through_linear(
        pool.kv,
        (weighed.weights.transpose(-2, -1) @ to_heads).transpose(1, 2).flatten(2),
        slice(x.shape[2], None),
    )
    to_tokens = over_all_tokens(to_values.transpose(1, 2), model.config).transpose(1, 2)
    return start_at_tokens(x, through_norm(model.norm, x, to_tokens))


def start_at_tokens(x: Tensor, gradient: Tensor) -> Start:
    """Begin at tokens x, [B, N, D], with the gradient with respect to them."""
    of_tokens = _dot(gradient, x.float())
    strongest, rows = _strongest(of_tokens)
    return Start(of_tokens, strongest, rows, _at(gradient, rows))


def _moved(weight: Tensor, attentions: list[Attention], kept: list[Kept], start: Start) -> Tensor:
    """Return what blocks' attention moves from the strongest tokens to those that they took it
    from, [B, S, N].

    Args:
        weight: `FoldedWeights.hops`.
        attentions, kept: of these blocks.
    """
    width = attentions[0].inner_width
    projected = nn.functional.linear(start.gradient.to(weight.dtype), weight)  # [B, S, hops D]
    moved: Tensor | None = None
    for place, (attention, of_block) in enumerate(zip(attentions, kept, strict=True)):
        bias = attention.bias()
        if bias is not None:
            bias = bias[0].transpose(0, 1)[start.strongest].transpose(1, 2)  # [B, heads, S, N]
        q = _at(of_block.q.transpose(1, 2), start.rows).transpose(1, 2)
        weights = _softmax(attention, q, of_block.k, bias)
        to_heads = projected[:, :, place * width : (place + 1) * width]
        to_heads = _through_norm_of_heads(attention, to_heads, weights, of_block.v)
        given = weights * (to_heads @ of_block.v.transpose(-2, -1))
        moved = given if moved is None else moved + given
    assert moved is not None
    return moved.sum(dim=1, dtype=torch.float32)


def _through_norm_of_heads(
    attention: Attention, gradient: Tensor, weights: Tensor, v: Tensor
) -> Tensor:
    """Return the gradient with respect to each head's values, [B, heads, Q, head_dim], from a
    folded projection's.

    What the projection leaves to do, if a norm is before it, is to divide by each token's
    deviation.

    Args:
        gradient: [B, Q, heads head_dim].
        weights: attention of these tokens, [B, heads, Q, N].
    """
    if isinstance(attention.norm, nn.LayerNorm):
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        gradient = gradient * inverse_deviation(attention.norm, mixed).to(gradient.dtype)
    return _by_head(gradient, attention.head_dim)


def _by_head(x: Tensor, head_dim: int) -> Tensor:
    """Split the last axis: [B, Q, heads head_dim] -> [B, heads, Q, head_dim]."""
    return x.reshape(*x.shape[:2], -1, head_dim).transpose(1, 2)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the product [B, N] of each two vectors, [B, N, D]."""
    if is_traced():
        # OpenVINO computes in float32 what reaches an output without a matrix product: here, all
        # tokens of all blocks.
        return (a.unsqueeze(2) @ b.unsqueeze(3)).flatten(1)
    return (a * b).sum(dim=2)


def _strongest(of_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return `strongest` and `rows` (see `Start`) of the tokens with the highest relevance for or
    against.

    They are an eighth of all, and at most 16.
    """
    batch, count = of_tokens.shape[0], int(of_tokens.shape[1])  # in a trace a size is a tensor
    strongest = of_tokens.abs().topk(min(_STRONGEST, math.ceil(count / 8)), dim=1).indices
    return strongest, strongest + torch.arange(batch, device=of_tokens.device).unsqueeze(1) * count


def _at(x: Tensor, rows: Tensor) -> Tensor:
    """Return the tokens in some rows: [B, N, ...] and int64 [B, S] give [B, S, ...]."""
    # Rows of a matrix are copied whole; other ways of indexing take each number by itself.
    chosen = x.flatten(2).flatten(0, 1).index_select(0, rows.flatten())
    return chosen.reshape(*rows.shape, *x.shape[2:])


def _softmax(attention: Attention, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Return the attention weights of some queries, [B, heads, Q, N]."""
    scores = (q * attention.head_dim**-0.5) @ k.transpose(-2, -1)
    weights: Tensor = (scores if bias is None else scores + bias).softmax(dim=-1)
    return weights
