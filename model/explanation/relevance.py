"""Relevance: what each patch brought to one class's lead over its rivals, at little more than a forward pass's cost.

It is gradient x input with the scales held constant (see `model.explanation.frozen_gradients`), in two steps.

1. The head reads few tokens, in most models the CLS token alone. The gradient goes back through these tokens' last
   steps to the attention that they were made with, and from there to all tokens. It needs no pass through the network.
2. A token's features come in part from others, by the attention of the blocks before. What the strongest tokens have
   from there is moved to where it was taken: `HOPS` blocks back, along the residual connections, past the MLPs.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from model.config import ViTConfig
from model.explanation.explicit_forward import blocks_of, over_all_tokens, tokens_read
from model.explanation.frozen_gradients import (
    lead_gradient,
    through_head,
    through_linear,
    through_mlp,
    through_norm,
    through_pooling,
    through_projection,
    through_scale,
)
from model.network.layers.attention import Attention
from model.network.layers.block import Block, Kept
from model.network.layers.pooling import AttentionPool, pool_tokens
from model.network.vit import VisionTransformer, ViTOutput

HOPS: Final = 2
KEPT: Final = HOPS + 1
"""How many of the last blocks a forward pass must keep for `token_relevance`."""

_STRONGEST: Final = 32


def relevance(model: VisionTransformer, pixels: Tensor, classes: Tensor) -> Tensor:
    """Return the relevance of each token for the class: float32 [B, N], not negative.

    Args:
        pixels, classes: see `model.explanation.methods.explain`.
    """
    with torch.no_grad():
        output = model(pixels, keep=KEPT)
        return sharpened(token_relevance(model, output, classes), model.config)


def sharpened(found: Tensor, config: ViTConfig) -> Tensor:
    """Return a map's tokens from what `token_relevance` found: float32 [B, N], not negative.

    Patches are smoothed by a Gaussian of a 32nd of the grid's shorter side, less than half a patch of 14. Of the result
    the positive part is squared, which lets the many patches that brought a little fade against those that brought
    much, and does not change their order or the share of all patches.
    """
    prefix, patches = found[:, : config.prefix_tokens], found[:, config.prefix_tokens :]
    sigma = min(config.grid) / 32
    down, across = (_gaussian(size, sigma, found.device) for size in config.grid)
    patches = (down @ patches.reshape(-1, *config.grid) @ across.T).flatten(1).relu()
    highest = patches.amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    squared = (patches / highest) ** 2  # a gradient may be tiny, and its square would vanish
    scale = patches.sum(dim=1, keepdim=True) / squared.sum(dim=1, keepdim=True).clamp_min(1.0)
    return torch.cat((prefix.relu(), squared * scale), dim=1)


def _gaussian(size: int, sigma: float, device: torch.device) -> Tensor:
    """Return the matrix that smooths along an axis of patches, [size, size]; each row sums to 1."""
    places = torch.arange(size, dtype=torch.float32, device=device)
    return (-(((places.unsqueeze(1) - places) / sigma) ** 2) / 2).softmax(dim=1)


class _Start(NamedTuple):
    """The relevance of all tokens and what is known of the strongest ones.

    Attributes:
        found: [B, N].
        chosen: [B, S, N], a row for each of the strongest tokens that is 1 there and else 0. Products with it take and
            put back tokens; on a CPU they are faster than gathering.
        gradient: with respect to the strongest tokens, [B, S, D].
    """

    found: Tensor
    chosen: Tensor
    gradient: Tensor


def token_relevance(model: VisionTransformer, output: ViTOutput, classes: Tensor) -> Tensor:
    """Return what each token brought to the class's lead, negative where it spoke against: float32 [B, N].

    Args:
        output: of a forward pass with `keep=KEPT`.
        classes: int64 [B].
    """
    assert output.kept is not None
    kept = output.kept.blocks
    blocks = blocks_of(model)[-len(kept) :]
    if model.config.pool == "cls":
        start = _start_at_block(model, blocks[-1], kept[-1], output.logits, classes)
        blocks, kept = blocks[:-1], kept[:-1]
    elif model.attn_pool is not None:
        start = _start_at_pool(model, model.attn_pool, output.kept.tokens, output.logits, classes)
    else:
        start = _start_at_tokens(model, output.kept.tokens, output.logits, classes)
    found = start.found
    for block, attended in list(zip(blocks, kept, strict=True))[: -HOPS - 1 : -1]:
        found = found + _hop(block, attended, start)
    return found


def _start_at_block(model: VisionTransformer, block: Block, kept: Kept, logits: Tensor, classes: Tensor) -> _Start:
    """Go back from the tokens that the head reads through the last block, whose input has the relevance."""
    read, attention = tokens_read(model.config), block.attn
    q, entering = kept.q[:, :, :read], kept.x[:, :read]
    bias = attention.bias()
    weights = _softmax(attention, q, kept.k, None if bias is None else bias[:, :, :read])
    attended = entering + block.ls1(attention.proj(_joined(weights.to(kept.v.dtype) @ kept.v)))
    normed = block.norm2(attended)
    left = attended + block.ls2(block.mlp(normed))
    gradient = _at_last_tokens(model, left, logits, classes)
    to_mlp = through_mlp(block.mlp, normed, through_scale(block.ls2, gradient))
    gradient = gradient + through_norm(block.norm2, attended, to_mlp)  # [B, read, D]
    to_heads = through_projection(attention.proj, through_scale(block.ls1, gradient), attention.heads)
    found = (weights * _through_values(block, kept.v, to_heads)).sum(dim=(1, 2))
    own = (gradient * entering.float()).sum(dim=-1)
    found = torch.cat((found[:, :read] + own, found[:, read:]), dim=1)
    chosen = _strongest(found)
    to_values = (chosen.unsqueeze(1) @ weights.transpose(-2, -1)) @ to_heads
    to_values = through_linear(attention.qkv, _joined(to_values), _values(attention))
    of_chosen = through_norm(block.norm1, chosen @ kept.x.float(), to_values)
    return _Start(found, chosen, of_chosen + chosen[:, :, :read] @ gradient)


def _at_last_tokens(model: VisionTransformer, left: Tensor, logits: Tensor, classes: Tensor) -> Tensor:
    """Return the gradient with respect to the tokens that the head reads, [B, read, D]."""
    if model.head_dist is None:
        return through_norm(model.norm, left, through_head(model, left[:, 0], logits, classes).unsqueeze(1))
    lead = lead_gradient(logits, classes) / 2
    heads = torch.stack([through_linear(head, lead) for head in (model.head, model.head_dist)], dim=1)
    return through_norm(model.norm, left, heads)


def _start_at_pool(model: VisionTransformer, pool: AttentionPool, x: Tensor, logits: Tensor, classes: Tensor) -> _Start:
    """Go back from the pooling query's vector to the tokens that it looked at."""
    width, normed = x.shape[2], model.norm(x)[:, pool.skipped :]
    q = pool.q(pool.latent).unflatten(2, (pool.heads, pool.head_dim)).transpose(1, 2)
    k, v = pool.kv(normed).unflatten(2, (2, pool.heads, pool.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
    weights = ((q * pool.head_dim**-0.5) @ k.transpose(-2, -1)).float().softmax(dim=-1)
    pooled = pool.proj(_joined(weights.to(v.dtype) @ v))
    hidden = pool.norm(pooled)
    gradient = through_head(model, (pooled + pool.mlp(hidden))[:, 0], logits, classes).unsqueeze(1)
    gradient = gradient + through_norm(pool.norm, pooled, through_mlp(pool.mlp, hidden, gradient))
    to_heads = through_projection(pool.proj, gradient, pool.heads)
    to_values = through_linear(pool.kv, _joined(weights.transpose(-2, -1) @ to_heads), slice(width, None))
    to_tokens = over_all_tokens(to_values.transpose(1, 2), model.config).transpose(1, 2)
    return _start(x, through_norm(model.norm, x, to_tokens))


def _start_at_tokens(model: VisionTransformer, x: Tensor, logits: Tensor, classes: Tensor) -> _Start:
    """Go back from the pooled vector to the tokens that are pooled by a rule."""
    normed = model.norm(x)
    gradient = through_head(model, pool_tokens(normed, model.config), logits, classes)
    return _start(x, through_norm(model.norm, x, through_pooling(normed, gradient, model.config)))


def _start(x: Tensor, gradient: Tensor) -> _Start:
    found = (gradient * x.float()).sum(dim=-1)
    chosen = _strongest(found)
    return _Start(found, chosen, chosen @ gradient)


def _hop(block: Block, kept: Kept, start: _Start) -> Tensor:
    """Return what this block's attention moves from the strongest tokens to those that they took it from: [B, N]."""
    attention, bias, chosen = block.attn, block.attn.bias(), start.chosen.unsqueeze(1)
    weights = _softmax(
        attention, chosen.to(kept.q.dtype) @ kept.q, kept.k, None if bias is None else chosen.to(bias.dtype) @ bias
    )
    to_heads = through_projection(attention.proj, through_scale(block.ls1, start.gradient), attention.heads)
    moved = (weights * _through_values(block, kept.v, to_heads)).sum(dim=1)  # [B, S, N]
    left: Tensor = moved.sum(dim=1) - (moved.sum(dim=2).unsqueeze(1) @ start.chosen).squeeze(1)
    return left


def _strongest(found: Tensor) -> Tensor:
    """Return which tokens have the highest relevance for or against: an eighth of all, at most 32; see `_Start`."""
    count = int(found.shape[1])  # in a trace a size is a tensor
    best = found.abs().topk(min(_STRONGEST, math.ceil(count / 8)), dim=1).indices
    chosen: Tensor = best.unsqueeze(2) == torch.arange(count, device=found.device)
    return chosen.float()


def _softmax(attention: Attention, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Return the attention weights of some queries, float32 [B, heads, Q, N]."""
    scores = (q * attention.head_dim**-0.5) @ k.transpose(-2, -1)
    weights: Tensor = (scores if bias is None else scores + bias).float().softmax(dim=-1)
    return weights


def _values(attention: Attention) -> slice:
    """Return the rows of the QKV projection that give the values."""
    return slice(2 * attention.heads * attention.head_dim, None)


def _through_values(block: Block, v: Tensor, to_heads: Tensor) -> Tensor:
    """Return how much each token's values less their bias add to the score, float32 [B, heads, Q, N].

    Args:
        v: [B, heads, N, head_dim].
        to_heads: gradient with respect to the attended values, float32 [B, heads, Q, head_dim].
    """
    attention, rows = block.attn, _values(block.attn)
    bias = None if attention.qkv.bias is None else attention.qkv.bias[rows]
    offset = nn.functional.linear(block.norm1.bias, attention.qkv.weight[rows], bias)
    offset = offset.reshape(attention.heads, attention.head_dim, 1).float()
    return (to_heads.to(v.dtype) @ v.transpose(-2, -1)).float() - to_heads @ offset


def _joined(x: Tensor) -> Tensor:
    """Join [B, heads, Q, head_dim] to [B, Q, D]."""
    return x.transpose(1, 2).flatten(2)
