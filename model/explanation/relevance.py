"""Relevance: what each patch brought to one class's lead over its rivals, at little more than a forward pass's cost.

It is gradient x input with the scales held constant (see `model.explanation.frozen_gradients`), in two steps.

1. The head reads few tokens, in most models the CLS token alone. The gradient goes back through these tokens' last
   steps to the attention that they were made with, and from there to all tokens. It needs no pass through the network.
2. A token's features come in part from others, by the attention of the blocks before. What the strongest tokens have
   from there is moved to where it was taken: `HOPS` blocks back, along the residual connections, past the MLPs.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from model.config import ViTConfig
from model.explanation.explicit_forward import blocks_of, over_all_tokens, tokens_read
from model.explanation.frozen_gradients import (
    through_head,
    through_lead,
    through_linear,
    through_mlp,
    through_norm,
    through_norm_of_one,
    through_pooling,
    through_projection,
    through_scale,
    with_rivals,
)
from model.network.layers.attention import Attention
from model.network.layers.block import Block, Kept
from model.network.layers.pooling import AttentionPool
from model.network.vit import VisionTransformer, ViTOutput

HOPS: Final = 2
KEPT: Final = HOPS + 1
"""How many of the last blocks a forward pass must keep for `token_relevance`."""

_STRONGEST: Final = 16


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
    sigma = min(config.grid) / 32
    down, across = (_gaussian(size, sigma, found.device) for size in config.grid)
    patches = found[:, config.prefix_tokens :].reshape(-1, *config.grid)
    patches = (down @ patches @ across.T).flatten(1).relu()
    highest = patches.amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    patches = patches / highest  # a gradient may be tiny, and its square would vanish
    squared = patches * patches
    if not config.prefix_tokens:
        return squared
    scale = highest * patches.sum(dim=1, keepdim=True) / squared.sum(dim=1, keepdim=True).clamp_min(1.0)
    return torch.cat((found[:, : config.prefix_tokens].relu(), squared * scale), dim=1)


@lru_cache(maxsize=8)
def _gaussian(size: int, sigma: float, device: torch.device) -> Tensor:
    """Return the matrix that smooths along an axis of patches, [size, size]; each row sums to 1."""
    with torch.inference_mode(mode=False):
        places = torch.arange(size, dtype=torch.float32, device=device)
        return (-(((places.unsqueeze(1) - places) / sigma) ** 2) / 2).softmax(dim=1)


class _Start(NamedTuple):
    """The relevance of all tokens and what is known of the strongest ones.

    Attributes:
        found: [B, N].
        strongest: the places of the strongest tokens, int64 [B, S].
        rows: the same places in a matrix of all images' tokens, [B N, ...].
        gradient: with respect to them, [B, S, D].
    """

    found: Tensor
    strongest: Tensor
    rows: Tensor
    gradient: Tensor


def token_relevance(model: VisionTransformer, output: ViTOutput, classes: Tensor | None = None) -> Tensor:
    """Return what each token brought to the class's lead, negative where it spoke against: float32 [B, N].

    The scale of an image's relevance is of no account.

    Args:
        output: of a forward pass with `keep=KEPT`.
        classes: int64 [B]; None is the best one of each image.
    """
    assert output.kept is not None
    ranked = with_rivals(output.logits, classes)
    kept, tokens = output.kept
    blocks = blocks_of(model)[-len(kept) :]
    if model.config.pool == "cls":
        start = _start_at_block(model, blocks[-1], kept[-1], tokens, ranked)
        blocks, kept = blocks[:-1], kept[:-1]
    elif model.attn_pool is not None:
        start = _start_at_pool(model, model.attn_pool, tokens, ranked)
    else:
        start = _start_at_tokens(model, tokens, ranked)
    found, lost = start.found, torch.zeros_like(start.strongest, dtype=torch.float32)
    for block, attended in list(zip(blocks, kept, strict=True))[: -HOPS - 1 : -1]:
        moved = _hop(block, attended, start)
        found, lost = found + moved.sum(dim=1), lost + moved.sum(dim=2)
    return found.scatter_add(1, start.strongest, -lost)


def _start_at_block(model: VisionTransformer, block: Block, kept: Kept, left: Tensor, ranked: Tensor) -> _Start:
    """Go back from the tokens that the head reads through the last block, whose input has the relevance.

    Args:
        left: the last block's output of these tokens, perhaps of more, [B, read or more, D].
        ranked: see `with_rivals`.
    """
    attention, read, bias = block.attn, tokens_read(model.config) or 0, block.attn.bias()
    gradient, attended = _at_last_tokens(model, left[:, :read], ranked), kept.attended[:, :read]
    to_mlp = through_mlp(block.mlp, block.norm2(attended), through_scale(block.ls2, gradient))
    gradient = gradient + through_norm(block.norm2, attended, to_mlp)  # [B, read, D]
    weights = _softmax(attention, kept.q[:, :, :read], kept.k, None if bias is None else bias[:, :, :read])
    to_heads, given = _through_values(block, kept.v, gradient)
    own = (gradient * kept.x[:, :read].float()).sum(dim=2)
    found = (weights * given).sum(dim=(1, 2)).float() + nn.functional.pad(own, (0, int(kept.x.shape[1]) - read))
    strongest, rows = _strongest(found)
    of_strongest = _at(weights.permute(0, 3, 1, 2), rows)  # [B, S, heads, read]
    to_values = (of_strongest.unsqueeze(4) * to_heads.unsqueeze(1)).sum(dim=3).flatten(2)
    to_values = through_linear(attention.qkv, to_values, _values(attention))
    onward = through_norm(block.norm1, _at(kept.x, rows), to_values)
    is_read = strongest.unsqueeze(2) == torch.arange(read, device=strongest.device)
    return _Start(found, strongest, rows, onward + is_read.float() @ gradient)


def _at_last_tokens(model: VisionTransformer, left: Tensor, ranked: Tensor) -> Tensor:
    """Return the gradient with respect to the tokens that the head reads, [B, read, D]."""
    if model.head_dist is None:
        return through_norm_of_one(model.norm, through_head(model, ranked)).unsqueeze(1)
    heads = torch.stack([through_lead(head, ranked) / 2 for head in (model.head, model.head_dist)], dim=1)
    return through_norm(model.norm, left, heads)


def _start_at_pool(model: VisionTransformer, pool: AttentionPool, x: Tensor, ranked: Tensor) -> _Start:
    """Go back from the pooling query's vector to the tokens that it looked at."""
    width, normed = x.shape[2], model.norm(x)[:, pool.skipped :]
    q = pool.q(pool.latent).unflatten(2, (pool.heads, pool.head_dim)).transpose(1, 2)
    k, v = pool.kv(normed).unflatten(2, (2, pool.heads, pool.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
    weights = ((q * pool.head_dim**-0.5) @ k.transpose(-2, -1)).float().softmax(dim=-1)
    pooled = pool.proj((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))
    hidden = pool.norm(pooled)
    gradient = through_head(model, ranked).unsqueeze(1)
    gradient = gradient + through_norm(pool.norm, pooled, through_mlp(pool.mlp, hidden, gradient))
    to_heads, _ = through_projection(pool.proj, gradient, gradient.new_zeros(pool.heads, pool.head_dim))
    to_values = through_linear(
        pool.kv, (weights.transpose(-2, -1) @ to_heads).transpose(1, 2).flatten(2), slice(width, None)
    )
    to_tokens = over_all_tokens(to_values.transpose(1, 2), model.config).transpose(1, 2)
    return _start(x, through_norm(model.norm, x, to_tokens))


def _start_at_tokens(model: VisionTransformer, x: Tensor, ranked: Tensor) -> _Start:
    """Go back from the pooled vector to the tokens that are pooled by a rule."""
    normed = model.norm(x)
    gradient = through_head(model, ranked)
    return _start(x, through_norm(model.norm, x, through_pooling(normed, gradient, model.config)))


def _start(x: Tensor, gradient: Tensor) -> _Start:
    found = (gradient * x.float()).sum(dim=-1)
    strongest, rows = _strongest(found)
    return _Start(found, strongest, rows, _at(gradient, rows))


def _hop(block: Block, kept: Kept, start: _Start) -> Tensor:
    """Return what this block's attention moves from the strongest tokens to those that they took it from: [B, S, N]."""
    bias = block.attn.bias()
    if bias is not None:
        bias = bias[0].transpose(0, 1)[start.strongest].transpose(1, 2)  # [B, heads, S, N]
    q = _at(kept.q.transpose(1, 2), start.rows).transpose(1, 2)
    _, given = _through_values(block, kept.v, start.gradient)
    return (_softmax(block.attn, q, kept.k, bias) * given).sum(dim=1).float()


def _strongest(found: Tensor) -> tuple[Tensor, Tensor]:
    """Return `strongest` and `rows` (see `_Start`) of the tokens with the highest relevance for or against.

    They are an eighth of all, and at most 16.
    """
    batch, count = found.shape[0], int(found.shape[1])  # in a trace a size is a tensor
    strongest = found.abs().topk(min(_STRONGEST, math.ceil(count / 8)), dim=1).indices
    return strongest, strongest + torch.arange(batch, device=found.device).unsqueeze(1) * count


def _at(x: Tensor, rows: Tensor) -> Tensor:
    """Return the tokens in some rows: [B, N, ...] and int64 [B, S] give [B, S, ...]."""
    # Rows of one matrix are copied whole; other ways of indexing take each number by itself.
    found: Tensor = x.flatten(2).flatten(0, 1)[rows]
    return found.reshape(*rows.shape, *x.shape[2:])


def _softmax(attention: Attention, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Return the attention weights of some queries, [B, heads, Q, N]."""
    scores = (q * attention.head_dim**-0.5) @ k.transpose(-2, -1)
    weights: Tensor = (scores if bias is None else scores + bias).softmax(dim=-1)
    return weights


def _values(attention: Attention) -> slice:
    """Return the rows of the QKV projection that give the values."""
    return slice(2 * attention.heads * attention.head_dim, None)


def _through_values(block: Block, v: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient by head, and how much each token's values less their bias add to the score.

    Args:
        v: [B, heads, N, head_dim].
        gradient: with respect to tokens after they attended, float32 [B, Q, D].

    Returns:
        float32 [B, heads, Q, head_dim], and [B, heads, Q, N].
    """
    attention, rows = block.attn, _values(block.attn)
    bias = None if attention.qkv.bias is None else attention.qkv.bias[rows]
    offset = nn.functional.linear(block.norm1.bias, attention.qkv.weight[rows], bias)
    to_heads, of_offset = through_projection(
        attention.proj,
        through_scale(block.ls1, gradient),
        offset.reshape(attention.heads, attention.head_dim).float(),
    )
    return to_heads, to_heads.to(v.dtype) @ v.transpose(-2, -1) - of_offset.to(v.dtype)
