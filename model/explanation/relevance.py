"""Relevance of each token for a class's margin, at little more than a forward pass.

The margin is the class's logit minus the mean logit of its rivals. `class_relevance` gives its
gradient g for the tokens that the head reads, with the scales of features held constant (see
`model.explanation.frozen_gradients`). From there, relevance R takes four steps. In the formulas, x
are a block's input tokens, v its values, and A its attention weights. P leads from the gradient for
a token to the gradients for its attention heads, and V from the gradient for a value to x.

1. Seed. If the head reads all tokens, their relevance is gradient x input. If it reads few tokens
   q, in most models the CLS token, g[q] reaches each token j through the last block's attention,
   and q itself along the residual connection. This needs no pass through the network.

       all:  R[j] = g[j] . x[j]
       few:  R[j] = sum over q and heads of A[q, j] (P g[q]) . v[j]  +  g[j] . x[j] if j is a q

2. Strongest tokens. The S tokens s with the largest |R| get a gradient G by the same ways.

       all:  G[s] = g[s]
       few:  G[s] = sum over q and heads of A[q, s] V P g[q]  +  g[s] if s is a q

3. Trace back. A token's features come in part from other tokens j, through the attention of earlier
   blocks. The same part M of the strongest tokens' relevance moves to its sources: two blocks back,
   along the residual connections, past the MLPs.

       M[s, j] = sum over blocks and heads of A[s, j] (P G[s]) . v[j]
       R[j] += sum over s of M[s, j]
       R[s] -= sum over j of M[s, j]

4. Coarse grids. There, a token has seen more than its patch. Relevance goes three blocks back, is
   smoothed, and is multiplied by the square root of the share of each token that arrives at the
   head's input. `sharpened_maps` squares relevance, and so weights the map by that share.

Sizes in shapes: B images, N tokens, S strongest tokens, Q queries, `read` tokens that the head
reads, D features, H attention heads of `head_dim`.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from model.explanation.folded_weights import ReadoutWeights
from model.explanation.frozen_gradients import (
    inverse_deviation,
    is_traced,
    through_mlp,
    through_norm,
    through_scale,
)
from model.network.layers.attention import Attention
from model.network.layers.block import Block, Kept

_STRONGEST: Final = 16

# A block and the intermediate results of its pass.
PassedBlock = tuple[Block, Kept]


class _Seed(NamedTuple):
    """The relevance where it begins, and the strongest tokens there with their gradients.

    Attributes:
        relevance: R, float32 [B, N].
        strongest: indices of the strongest tokens, int64 [B, S].
        rows: indices of the same tokens in a matrix of all images' tokens, [B N, ...].
        gradient: G, [B, S, D].
    """

    relevance: Tensor
    strongest: Tensor
    rows: Tensor
    gradient: Tensor


def relevance_of_tokens(
    weights: ReadoutWeights,
    smoothing: Tensor | None,
    passed: Sequence[PassedBlock],
    x: Tensor,
    gradient: Tensor,
    share: Tensor | None,
) -> Tensor:
    """Return the relevance R of each token, which may be negative: float32 [B, N].

    Args:
        weights: folded for this readout.
        smoothing: see `FoldedWeights`.
        passed: last blocks up to the readout, at most `kept_blocks`.
        x: output of the last of them, [B, N, D]; if few tokens are read, perhaps only these.
        gradient: g, of the margin for the tokens that are read, float32 [B, read or N, D].
        share: share of each token of `x` in the readout, float32 [B, N]; only for smoothing.
    """
    if weights.values is None:
        relevance = _traced_back(weights, passed, _seed_at_tokens(x, gradient))
    else:
        seed = _seed_in_block(weights, *passed[-1], gradient)
        relevance = _traced_back(weights, passed[:-1], seed)
    if smoothing is None:
        return relevance
    assert share is not None
    return (relevance @ smoothing) * _arriving_share(share, passed).sqrt()


# 1 and 2. Seed and strongest tokens


def _seed_at_tokens(x: Tensor, gradient: Tensor) -> _Seed:
    """Begin at tokens x that are all read, [B, N, D]."""
    relevance = _dot(gradient, x.float())
    strongest, rows = _strongest(relevance)
    return _Seed(relevance, strongest, rows, _at(gradient, rows))


def _seed_in_block(weights: ReadoutWeights, block: Block, kept: Kept, gradient: Tensor) -> _Seed:
    """Begin at the input of the last block, whose first tokens are read, [B, read, D]."""
    assert weights.last is not None
    assert weights.values is not None
    read = int(gradient.shape[1])
    gradient = gradient + _through_mlp_branch(block, kept, gradient)
    projected = nn.functional.linear(gradient.to(weights.last.dtype), weights.last)
    attention = _attention_of_first(block.attn, kept, read)  # [B, H, read, N]
    to_heads = _to_heads(block.attn, kept, attention, projected)  # [B, H, read, head_dim]

    # 1. Seed
    through_attention = attention * (to_heads @ kept.v.transpose(-2, -1))  # [B, H, read, N]
    along_residual = _dot(gradient, kept.x[:, :read].float())  # [B, read]
    unread = int(kept.x.shape[1]) - read
    relevance = through_attention.sum(dim=(1, 2), dtype=torch.float32) + nn.functional.pad(
        along_residual, (0, unread)
    )

    # 2. Strongest tokens
    strongest, rows = _strongest(relevance)
    shares = _at(attention.flatten(1, 2).transpose(1, 2), rows)  # [B, S, H read]
    shares = shares * inverse_deviation(block.norm1, _at(kept.x, rows)).to(shares.dtype)
    to_inputs = to_heads.transpose(0, 1).flatten(1, 2) @ weights.values  # [H, B read, D]
    to_inputs = to_inputs.reshape(block.attn.heads, -1, read, to_inputs.shape[2])
    to_inputs = to_inputs.transpose(0, 1).flatten(1, 2)  # [B, H read, D]
    # A strongest token that is read also has the gradient along the residual connection.
    is_read = strongest.unsqueeze(2) == torch.arange(read, device=strongest.device)  # [B, S, read]
    # [B, S, H read + read] @ [B, H read + read, D]
    shares = torch.cat((shares, is_read.to(shares.dtype)), dim=2)
    to_inputs = torch.cat((to_inputs, gradient.to(to_inputs.dtype)), dim=1)
    return _Seed(relevance, strongest, rows, shares @ to_inputs)


def _through_mlp_branch(block: Block, kept: Kept, gradient: Tensor) -> Tensor:
    """Return the gradient for the first tokens after the attention, through the MLP's branch.

    Args:
        gradient: for the block's output, [B, read, D].
    """
    read = gradient.shape[1]
    attended = kept.attended[:, :read]
    hidden = kept.hidden
    if hidden is None:
        hidden = block.mlp.fc1(block.norm2(attended))
    to_mlp = through_mlp(block.mlp, hidden[:, :read], through_scale(block.ls2, gradient))
    return through_norm(block.norm2, attended, to_mlp)


def _strongest(relevance: Tensor) -> tuple[Tensor, Tensor]:
    """Return `strongest` and `rows` (see `_Seed`) of the tokens with the most absolute relevance.

    They are an eighth of all tokens, and at most 16.
    """
    count = int(relevance.shape[1])  # a size is a tensor in a trace
    strongest = relevance.abs().topk(min(_STRONGEST, math.ceil(count / 8)), dim=1).indices
    offsets = torch.arange(relevance.shape[0], device=relevance.device) * count
    return strongest, strongest + offsets.unsqueeze(1)


# 3. Trace back


def _traced_back(weights: ReadoutWeights, passed: Sequence[PassedBlock], seed: _Seed) -> Tensor:
    """Return the relevance after moving it through the last blocks, float32 [B, N].

    Args:
        passed: blocks before the seed.
    """
    if weights.hops is None:
        return seed.relevance
    joined = nn.functional.linear(seed.gradient.to(weights.hops.dtype), weights.hops)
    projected = torch.split(joined, passed[-1][0].attn.inner_width, dim=2)  # of each hop
    of_blocks: list[Tensor] = []
    # There may be more blocks than hops.
    for (block, kept), of_block in zip(reversed(passed), projected, strict=False):
        q = _at(kept.q.transpose(1, 2), seed.rows).transpose(1, 2)  # [B, H, S, head_dim]
        bias = block.attn.bias()
        if bias is not None:
            bias = bias[0].transpose(0, 1)[seed.strongest].transpose(1, 2)  # [B, H, S, N]
        attention = _softmax(block.attn, q, kept.k, bias)  # [B, H, S, N]
        to_heads = _to_heads(block.attn, kept, attention, of_block)  # [B, H, S, head_dim]
        of_blocks.append(attention * (to_heads @ kept.v.transpose(-2, -1)))
    moved = reduce(torch.add, of_blocks).sum(dim=1, dtype=torch.float32)  # M, [B, S, N]
    gained = seed.relevance + moved.sum(dim=1)
    return gained.scatter_add(1, seed.strongest, -moved.sum(dim=2))


# 4. Coarse grids


def _arriving_share(share: Tensor, passed: Sequence[PassedBlock]) -> Tensor:
    """Return the share of each token of the first block's input in the readout, float32 [B, N].

    This is attention rollout (Abnar and Zuidema 2020) through these blocks only.

    Args:
        share: share of each token of the last block's output, float32 [B, N].
    """
    for block, kept in reversed(passed):
        queries = kept.q.shape[2]
        attention = _attention_of_first(block.attn, kept, queries).float().mean(dim=1)
        through_attention = (share[:, :queries].unsqueeze(1) @ attention).squeeze(1)
        share = (share + through_attention) / 2
    return share


# Attention, and gradients through it


def _attention_of_first(attention: Attention, kept: Kept, count: int) -> Tensor:
    """Return the attention weights of the first `count` tokens, [B, H, count, N]."""
    bias = attention.bias()
    if bias is not None:
        bias = bias[:, :, :count]
    return _softmax(attention, kept.q[:, :, :count], kept.k, bias)


def _softmax(attention: Attention, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Return the attention weights of some queries, [B, H, Q, N]."""
    scores = (q * attention.head_dim**-0.5) @ k.transpose(-2, -1)
    weights: Tensor = (scores if bias is None else scores + bias).softmax(dim=-1)
    return weights


def _to_heads(attention: Attention, kept: Kept, weights: Tensor, projected: Tensor) -> Tensor:
    """Return P g, the gradient for the output of each attention head: [B, H, Q, head_dim].

    Args:
        weights: attention weights of some tokens, [B, H, Q, N].
        projected: gradient of these tokens after the folded projection, which lacks only the
            division by a norm's deviation, [B, Q, H head_dim].
    """
    if isinstance(attention.norm, nn.LayerNorm):
        mixed = (weights @ kept.v).transpose(1, 2).flatten(2)
        projected = projected * inverse_deviation(attention.norm, mixed).to(projected.dtype)
    return projected.reshape(*projected.shape[:2], -1, attention.head_dim).transpose(1, 2)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the scalar products of vectors, [B, N, D] -> [B, N]."""
    if is_traced():
        # Without a matrix product before the output, OpenVINO would compute all tokens of all
        # blocks in float32.
        return (a.unsqueeze(2) @ b.unsqueeze(3)).flatten(1)
    return (a * b).sum(dim=2)


def _at(x: Tensor, rows: Tensor) -> Tensor:
    """Return the tokens in these rows: [B, N, ...] and int64 [B, S] give [B, S, ...]."""
    # `index_select` copies whole rows; other ways of indexing copy number by number.
    chosen = x.flatten(2).flatten(0, 1).index_select(0, rows.flatten())
    return chosen.reshape(*rows.shape, *x.shape[2:])
