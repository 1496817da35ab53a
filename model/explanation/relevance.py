"""Relevance: each patch's contribution to a class's margin, at little more than a forward pass.

The margin is the class's logit minus the mean logit of its rivals. Gradients are taken with the
scales held constant (see `model.explanation.frozen_gradients`), in two steps.

1. The head reads few tokens, in most models only the CLS token. A token's relevance is the last
   block's attention to it times the gradient for that attention. This needs no pass through the
   network. If the head reads all tokens, their relevance is gradient x input.
2. A token's features come in part from other tokens, through the attention of earlier blocks. This
   part of the strongest tokens' relevance is moved to its sources, again by attention times
   gradient: two blocks back, along the residual connections, past the MLPs.

On a coarse grid, a token has seen more than its patch. There, relevance goes three blocks back and
is smoothed. It is also multiplied by the square root of the share of the token that arrives at the
head's input: `sharpened_maps` squares relevance, and so the map is weighted by that share.

Sizes in shapes: B images, N tokens, S strongest tokens, D features, `heads` attention heads of
`head_dim`, `read` tokens that the head reads, and Q queries.
"""

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from model.config import ViTConfig
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
from model.explanation.readout import mix, over_all_tokens, readout, weigh_pool
from model.network.layers.attention import Attention
from model.network.layers.block import Block, Kept
from model.network.vit import AttentionPool, VisionTransformer, ViTOutput, blocks_of

_STRONGEST: Final = 16


class Start(NamedTuple):
    """The relevance of all tokens, and the strongest of them with their gradients.

    Attributes:
        relevance: [B, N].
        strongest: indices of the strongest tokens, int64 [B, S].
        rows: indices of the same tokens in a matrix of all images' tokens, [B N, ...].
        gradient: for the strongest tokens, [B, S, D].
    """

    relevance: Tensor
    strongest: Tensor
    rows: Tensor
    gradient: Tensor


def kept_blocks(config: ViTConfig) -> int:
    """Return the number of last blocks that a forward pass must keep for `token_relevance`."""
    return hops_of(config) + 1


def token_relevance(
    model: VisionTransformer,
    output: ViTOutput,
    weights: FoldedWeights,
    targets: Tensor | None = None,
) -> Tensor:
    """Return each token's contribution to the class's margin, may be negative: float32 [B, N].

    The scale of an image's relevance does not matter.

    Args:
        output: of a forward pass that keeps `kept_blocks`.
        weights: `fold` of the model.
        targets: classes, int64 [B]; None takes the best class of each image. Or directions, floats
            [B, `embedding_width`], each a class's row of another head minus the mean of its rivals'
            rows.
    """
    assert output.kept is not None
    if targets is not None and targets.is_floating_point():
        directions = [targets]
    else:
        ranked = with_rivals(output.logits, targets, len(weights.margin))
        directions = [margin_direction(head, ranked, weights) for head in heads_of(model)]
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
    """Return the relevance of each token from the kept blocks, [B, N].

    Args:
        tokens: output of the last block.
        margins: see `_margins`.
    """
    if model.config.pool == "cls":
        read = margins.shape[1]
        gradient = margins
        # The scale of a single token has no effect, but the scales of two tokens weight them.
        if read > 1 and isinstance(model.norm, nn.LayerNorm):
            gradient = gradient * inverse_deviation(model.norm, tokens[:, :read])
        start = start_at_block(weights, blocks[-1], kept[-1], gradient)
        return with_moved(model.config, weights, blocks[:-1], kept[:-1], start)
    if model.attn_pool is not None:
        assert weights.last is not None
        start = _start_at_pool(model, weights.last, model.attn_pool, tokens, margins)
    else:
        to_tokens = through_pooling(model.norm(tokens), margins, model.config)
        start = start_at_tokens(tokens, through_norm(model.norm, tokens, to_tokens))
    return with_moved(model.config, weights, blocks, kept, start)


def with_moved(
    config: ViTConfig, weights: FoldedWeights, blocks: list[Block], kept: list[Kept], start: Start
) -> Tensor:
    """Return each token's relevance after moving it through the last blocks, float32 [B, N]."""
    last_first = slice(None, -hops_of(config) - 1, -1)
    attentions = [block.attn for block in blocks[last_first]]
    if not attentions:
        return start.relevance
    moved = _moved(weights.hops, attentions, kept[last_first], start)  # [B, S, N]
    # The source tokens gain what the strongest tokens lose.
    return (start.relevance + moved.sum(dim=1)).scatter_add(1, start.strongest, -moved.sum(dim=2))


def arriving(row: Tensor, blocks: list[Block], kept: list[Kept]) -> Tensor:
    """Return the share of each token that arrives through these blocks, float32 [B, N].

    This is attention rollout (Abnar and Zuidema 2020) through the last blocks only.

    Args:
        row: share of each token of the last block's output in the head's input, float32 [B, N].
    """
    for block, kept_block in zip(reversed(blocks), reversed(kept), strict=True):
        queries = kept_block.q.shape[2]
        bias = block.attn.bias()
        if bias is not None:
            bias = bias[:, :, :queries]
        attention = _softmax(block.attn, kept_block.q, kept_block.k, bias)
        row = (row + (row[:, :queries].unsqueeze(1) @ attention.float().mean(dim=1)).squeeze(1)) / 2
    return row


def start_at_block(weights: FoldedWeights, block: Block, kept: Kept, gradient: Tensor) -> Start:
    """Begin at the first tokens of a block's output, and return the relevance of its input.

    Args:
        weights: `last` and `values` are of this block.
        gradient: for these tokens, float32 [B, read, D].
    """
    assert weights.last is not None
    assert weights.values is not None
    attention = block.attn
    read = int(gradient.shape[1])
    attended = kept.attended[:, :read]
    hidden = kept.hidden
    if hidden is None:
        hidden = block.mlp.fc1(block.norm2(attended))
    hidden = hidden[:, :read]  # [B, read, hidden features]
    to_mlp = through_mlp(block.mlp, hidden, through_scale(block.ls2, gradient))
    gradient = gradient + through_norm(block.norm2, attended, to_mlp)
    bias = attention.bias()
    if bias is not None:
        bias = bias[:, :, :read]
    weights_of_read = _softmax(attention, kept.q[:, :, :read], kept.k, bias)  # [B, heads, read, N]
    to_heads = nn.functional.linear(gradient.to(weights.last.dtype), weights.last)
    # [B, heads, read, head_dim]
    to_heads = _through_norm_of_heads(attention, to_heads, weights_of_read, kept.v)
    # [B, heads, read, N]
    through_attention = weights_of_read * (to_heads @ kept.v.transpose(-2, -1))
    through_residual = _dot(gradient, kept.x[:, :read].float())  # [B, read]
    unread = int(kept.x.shape[1]) - read
    relevance = through_attention.sum(dim=(1, 2), dtype=torch.float32) + nn.functional.pad(
        through_residual, (0, unread)
    )
    strongest, rows = _strongest(relevance)
    shares = _at(weights_of_read.flatten(1, 2).transpose(1, 2), rows)  # [B, S, heads read]
    if isinstance(block.norm1, nn.LayerNorm):
        shares = shares * inverse_deviation(block.norm1, _at(kept.x, rows)).to(shares.dtype)
    to_values = to_heads.transpose(0, 1).flatten(1, 2) @ weights.values  # [heads, B read, D]
    # [B, heads, read, D]
    by_image = to_values.reshape(attention.heads, -1, read, to_values.shape[2]).transpose(0, 1)
    # A strongest token that the head reads also has the gradient along the residual connection.
    is_read = strongest.unsqueeze(2) == torch.arange(read, device=strongest.device)  # [B, S, read]
    # [B, S, heads read + read] @ [B, heads read + read, D]
    shares = torch.cat((shares, is_read.to(shares.dtype)), dim=2)
    to_inputs = torch.cat((by_image.flatten(1, 2), gradient.to(to_values.dtype)), dim=1)
    return Start(relevance, strongest, rows, shares @ to_inputs)


def margin_direction(head: nn.Linear, ranked: Tensor, weights: FoldedWeights) -> Tensor:
    """Return the direction in which a class's margin in a head rises, float32 [B, D].

    The margin is the logit of the class minus the mean logit of its rivals. The logit alone also
    rises with features that all likely classes share, such as those of any animal or vehicle. The
    difference to the strongest rivals cancels such features.

    Args:
        ranked: see `with_rivals`.
    """
    return (nn.functional.embedding(ranked, head.weight) * weights.margin).sum(dim=1)


def _margins(model: VisionTransformer, directions: list[Tensor]) -> Tensor:
    """Return the gradient of a class's margin for each head's input, [B, model heads, D or 2 D].

    The gradient is for the input of the norm before the head, without the scale per token.

    Args:
        directions: of the margin in each head, [B, D].
    """
    joined = torch.stack(directions, dim=1) if len(directions) > 1 else directions[0].unsqueeze(1)
    # The scale of an L2 norm before the head has no effect.
    if isinstance(model.projection, nn.Linear):
        joined = through_linear(model.projection, joined)
    joined = through_norm_unscaled(model.fc_norm, joined)
    return through_norm_unscaled(model.norm, joined) if model.config.pool == "cls" else joined


def _start_at_pool(
    model: VisionTransformer, folded: Tensor, pool: AttentionPool, x: Tensor, margins: Tensor
) -> Start:
    """Begin at the pooling query's vector, and return the relevance of the tokens it looked at."""
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
    """Begin at tokens x, [B, N, D], with the gradient for them."""
    relevance = _dot(gradient, x.float())
    strongest, rows = _strongest(relevance)
    return Start(relevance, strongest, rows, _at(gradient, rows))


def _moved(weight: Tensor, attentions: list[Attention], kept: list[Kept], start: Start) -> Tensor:
    """Return the relevance that blocks' attention moves from the strongest tokens, [B, S, N].

    Args:
        weight: `FoldedWeights.hops`.
        attentions, kept: of these blocks.
    """
    width = attentions[0].inner_width
    projected = nn.functional.linear(start.gradient.to(weight.dtype), weight)  # [B, S, hops D]
    moved: Tensor | None = None
    for index, (attention, of_block) in enumerate(zip(attentions, kept, strict=True)):
        bias = attention.bias()
        if bias is not None:
            bias = bias[0].transpose(0, 1)[start.strongest].transpose(1, 2)  # [B, heads, S, N]
        q = _at(of_block.q.transpose(1, 2), start.rows).transpose(1, 2)  # [B, heads, S, head_dim]
        weights = _softmax(attention, q, of_block.k, bias)  # [B, heads, S, N]
        to_heads = projected[:, :, index * width : (index + 1) * width]  # [B, S, D]
        to_heads = _through_norm_of_heads(attention, to_heads, weights, of_block.v)
        of_hop = weights * (to_heads @ of_block.v.transpose(-2, -1))
        moved = of_hop if moved is None else moved + of_hop
    assert moved is not None
    return moved.sum(dim=1, dtype=torch.float32)


def _through_norm_of_heads(
    attention: Attention, gradient: Tensor, weights: Tensor, v: Tensor
) -> Tensor:
    """Return the gradient for the values of each attention head, [B, heads, Q, head_dim].

    The folded projection contains the norm before it, except for the division by each token's
    deviation.

    Args:
        gradient: after the folded projection, [B, Q, heads head_dim].
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
    """Return the scalar products of vectors, [B, N, D] -> [B, N]."""
    if is_traced():
        # Without a matrix product before the output, OpenVINO would compute all tokens of all
        # blocks in float32.
        return (a.unsqueeze(2) @ b.unsqueeze(3)).flatten(1)
    return (a * b).sum(dim=2)


def _strongest(relevance: Tensor) -> tuple[Tensor, Tensor]:
    """Return `strongest` and `rows` (see `Start`) of the tokens with the most absolute relevance.

    They are an eighth of all tokens, and at most 16.
    """
    count = int(relevance.shape[1])  # a size is a tensor in a trace
    strongest = relevance.abs().topk(min(_STRONGEST, math.ceil(count / 8)), dim=1).indices
    offsets = torch.arange(relevance.shape[0], device=relevance.device) * count
    return strongest, strongest + offsets.unsqueeze(1)


def _at(x: Tensor, rows: Tensor) -> Tensor:
    """Return the tokens in these rows: [B, N, ...] and int64 [B, S] give [B, S, ...]."""
    # `index_select` copies whole rows; other ways of indexing copy number by number.
    chosen = x.flatten(2).flatten(0, 1).index_select(0, rows.flatten())
    return chosen.reshape(*rows.shape, *x.shape[2:])


def _softmax(attention: Attention, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Return the attention weights of some queries, [B, heads, Q, N]."""
    scores = (q * attention.head_dim**-0.5) @ k.transpose(-2, -1)
    weights: Tensor = (scores if bias is None else scores + bias).softmax(dim=-1)
    return weights
