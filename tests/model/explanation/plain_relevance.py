"""Relevance by automatic differentiation with constant scales, one token at a time.

It uses the network's layers, and not `model.explanation`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model.network.layers.block import Block, SwiGLU
from model.network.vit import VisionTransformer
from tests.model.blocks import blocks
from tests.model.explanation.plain_reference import attention_weights, first_row


def plain_relevance(model: VisionTransformer, pixels: Tensor, classes: Tensor) -> Tensor:
    """Return the relevance of each token, at least 0: [B, N]."""
    return torch.stack(
        [
            _of_image(model, one.unsqueeze(0), int(label))
            for one, label in zip(pixels, classes, strict=True)
        ]
    )


def _of_image(model: VisionTransformer, pixels: Tensor, label: int) -> Tensor:
    entering = _entering(model, pixels)

    def margin(x: Tensor) -> Tensor:
        logits = _frozen_read(model, x)[0]
        others = sorted(
            (logit for at, logit in enumerate(logits) if at != label), key=Tensor.item, reverse=True
        )[:10]
        return logits[label] - (sum(others) / len(others) if others else 0)

    found = _found(model, entering, margin, is_token=model.config.pool == "cls")
    return _sharpened(found, model, _arriving(model, entering, first_row(model.config, 1)[0]))


def plain_transfer_relevance(
    model: VisionTransformer, pixels: Tensor, directions: Tensor
) -> Tensor:
    """Return the relevance of each token along directions of the transfer features: [B, N].

    It is not sharpened yet.
    """
    return torch.stack(
        [
            _along(model, one.unsqueeze(0), each)
            for one, each in zip(pixels, directions, strict=True)
        ]
    )


def _along(model: VisionTransformer, pixels: Tensor, direction: Tensor) -> Tensor:
    config = model.config
    entering = _entering(model, pixels)
    read = range(max(0, config.depth - 3), config.depth)
    parts = [(block, config.class_token) for block in read]
    if config.class_token:
        parts.append((config.depth - 1, False))
    total = torch.zeros(config.tokens, dtype=pixels.dtype)
    for (block, is_token), part in zip(parts, direction.split(config.width), strict=True):

        def along(x: Tensor, is_token: bool = is_token, part: Tensor = part) -> Tensor:
            normed = _frozen_norm(model.norm, x)
            pooled = normed[:, 0] if is_token else normed[:, config.prefix_tokens :].mean(1)
            return (_frozen_norm(model.fc_norm, pooled)[0] * part).sum()

        found = _found(model, entering[: block + 2], along, is_token=is_token).to(total.dtype)
        if min(config.grid) <= 8:
            row = torch.zeros(config.tokens, dtype=pixels.dtype)
            row[0 if is_token else slice(config.prefix_tokens, None)] = 1 / (
                1 if is_token else math.prod(config.grid)
            )
            arriving = _arriving(model, entering[: block + 2], row)
            found = (
                torch.cat((found[: config.prefix_tokens], _smoothed(found, model)))
                * arriving.sqrt()
            )
        total += found
    return total


def _entering(model: VisionTransformer, pixels: Tensor) -> list[Tensor]:
    """Return the input of each block, and the output of the last block."""
    entering = [model.embed(pixels)]
    for block in blocks(model):
        entering.append(block(entering[-1])[0])
    return entering


def _found(
    model: VisionTransformer,
    entering: list[Tensor],
    objective: Callable[[Tensor], Tensor],
    *,
    is_token: bool,
) -> Tensor:
    """Return the relevance of each token for an objective of a block's output.

    The objective reads the first tokens, or all. The last item of `entering` is the output.
    """
    until = blocks(model)[: len(entering) - 1]
    through = until[-1:] if is_token else []
    leaf = entering[-1 - len(through)].detach().requires_grad_()
    x = leaf
    residual = leaf.detach().clone().requires_grad_()
    attended = torch.zeros(())
    for block in through:
        attended = attention_weights(block.attn, block.norm1(leaf)).detach().requires_grad_()
        x = _frozen_block(block, leaf, residual, attended)
    objective(x).backward()
    gradient = leaf.grad
    assert gradient is not None
    entered = leaf.detach()[0]
    if through:
        assert residual.grad is not None
        assert attended.grad is not None
        scores = (attended.grad * attended.detach())[0].sum((0, 1)) + (
            residual.grad[0] * entered
        ).sum(1)
        gradient = gradient + residual.grad
    else:
        scores = (gradient[0] * entered).sum(1)
    found = scores.tolist()
    order = sorted(range(len(found)), key=lambda token: abs(found[token]), reverse=True)
    strongest = order[: min(16, math.ceil(len(found) / 8))]
    before = until[: -1 if through else None]
    hops = 3 if min(model.config.grid) <= 8 else 2
    for place in range(len(before) - 1, max(-1, len(before) - 1 - hops), -1):
        given = _contributions(before[place], entering[place], strongest, gradient[0])
        for taker, row in zip(strongest, given.tolist(), strict=True):
            for giver, share in enumerate(row):
                found[giver] += share
                found[taker] -= share
    return torch.tensor(found)


def _arriving(model: VisionTransformer, entering: list[Tensor], row: Tensor) -> Tensor:
    """Return the share of each token that arrives at the head's input through the last blocks."""
    count = (3 if min(model.config.grid) <= 8 else 2) + 1
    for block, x in reversed(list(zip(blocks(model), entering[:-1], strict=False))[-count:]):
        row = (row + row @ attention_weights(block.attn, block.norm1(x))[0].mean(0)) / 2
    return torch.as_tensor(row).detach()


def _contributions(block: Block, x: Tensor, takers: list[int], gradient: Tensor) -> Tensor:
    """Return each token's contribution to the takers, times their gradient: [takers, N]."""
    layer = block.attn
    width = layer.qkv.out_features // 3
    heads = layer.heads
    weights = attention_weights(layer, block.norm1(x))[0]
    values = layer.qkv(block.norm1(x))[0, :, 2 * width :].unflatten(1, (heads, width // heads))
    given = torch.einsum("hqk,khd->qkhd", weights[:, takers], values).flatten(2)
    if isinstance(layer.norm, nn.LayerNorm):
        mixed = given.sum(1, keepdim=True)
        scale = (mixed.var(-1, unbiased=False, keepdim=True) + layer.norm.eps).sqrt()
        given = (given - given.mean(-1, keepdim=True)) / scale * layer.norm.weight
    given = given @ layer.proj.weight.T
    return torch.sum(block.ls1(given) * gradient[takers].unsqueeze(1), -1).detach()


def _frozen_norm(layer: nn.Module, x: Tensor) -> Tensor:
    if not isinstance(layer, nn.LayerNorm):
        return x
    scale = (x.var(-1, unbiased=False, keepdim=True) + layer.eps).sqrt().detach()
    return (x - x.mean(-1, keepdim=True)) / scale * layer.weight + layer.bias


def _frozen_mlp(mlp: Any, x: Tensor) -> Tensor:
    hidden = mlp.fc1(x)
    if isinstance(mlp, SwiGLU):
        gate, hidden = hidden.chunk(2, dim=-1)
        return torch.as_tensor(
            mlp.fc2(_frozen_norm(mlp.norm, mlp.activation(gate).detach() * hidden))
        )
    return torch.as_tensor(
        mlp.fc2(_frozen_norm(mlp.norm, (mlp.activation(hidden) / hidden).detach() * hidden))
    )


def _frozen_block(block: Block, x: Tensor, residual: Tensor, weights: Tensor) -> Tensor:
    """Compute a block of x with these attention weights; `residual` bypasses them."""
    normed = _frozen_norm(block.norm1, x)
    values = block.attn.qkv(normed)[..., block.attn.qkv.out_features // 3 * 2 :].unflatten(
        2, (block.attn.heads, -1)
    )
    mixed = torch.einsum("bhqk,bkhd->bqhd", weights, values).flatten(2)
    x = residual + block.ls1(block.attn.proj(_frozen_norm(block.attn.norm, mixed)))
    left: Tensor = x + block.ls2(_frozen_mlp(block.mlp, _frozen_norm(block.norm2, x)))
    return left


def _frozen_read(model: VisionTransformer, x: Tensor) -> Tensor:
    """Return the logits of tokens [1, N, D]."""
    config = model.config
    x = _frozen_norm(model.norm, x)
    seen = x if config.pool_prefix else x[:, config.prefix_tokens :]
    if model.attn_pool is not None:
        pool = model.attn_pool
        width = config.width
        split = (pool.heads, width // pool.heads)
        q = pool.q(pool.latent).unflatten(2, split)[0, 0]
        k, v = (part.unflatten(2, split) for part in pool.kv(seen).split(width, dim=2))
        weights = (torch.einsum("hd,bkhd->bhk", q, k) / split[1] ** 0.5).softmax(dim=-1).detach()
        pooled = pool.proj(torch.einsum("bhk,bkhd->bhd", weights, v).flatten(1))
        pooled = pooled + _frozen_mlp(pool.mlp, _frozen_norm(pool.norm, pooled))
    elif config.pool == "cls":
        pooled = x[:, 0]
    elif config.pool == "cls_mean":
        pooled = torch.cat([x[:, 0], seen.mean(dim=1)], dim=1)
    else:
        pooled = {
            "mean": seen.mean(1),
            "max": seen.amax(1),
            "mean_max": (seen.mean(1) + seen.amax(1)) / 2,
        }[config.pool]
    pooled = model.projection(_frozen_norm(model.fc_norm, pooled))
    if config.normalized_head:
        pooled = pooled / pooled.norm(dim=1, keepdim=True).detach()
    logits = model.head(pooled)
    return torch.as_tensor(
        logits if model.head_dist is None else 0.5 * logits + 0.5 * model.head_dist(x[:, 1])
    )


def _sharpened(found: Tensor, model: VisionTransformer, arriving: Tensor) -> Tensor:
    """Smooth the patches by a Gaussian, and square their positive part.

    The weights sum to 1 inside of the grid. On a coarse grid, all tokens are weighted by the root
    of their arriving share before they are squared.
    """
    prefix = model.config.prefix_tokens
    coarse = min(model.config.grid) <= 8
    weights = arriving.sqrt() if coarse else torch.ones_like(arriving)
    positive = _smoothed(found, model).clamp(min=0) * weights[prefix:]
    squared = positive**2
    return torch.cat(
        [
            found[:prefix].clamp(min=0) * weights[:prefix],
            squared * positive.sum() / max(float(squared.sum()), 1e-30),
        ]
    )


def _smoothed(found: Tensor, model: VisionTransformer) -> Tensor:
    """Smooth patches by a Gaussian whose weights sum to 1 inside of the grid: [patches]."""
    prefix = model.config.prefix_tokens
    rows, columns = model.config.grid
    coarse = min(rows, columns) <= 8
    patches = found[prefix:].reshape(rows, columns)
    sigma = 0.64 if coarse else min(rows, columns) / 32
    places = torch.stack(
        torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1
    ).float()
    smooth = []
    for place in places.reshape(-1, 2):
        near = (-((places - place) ** 2).sum(-1) / (2 * sigma**2)).exp()
        smooth.append((near * patches).sum() / near.sum())
    return torch.stack(smooth).to(found.dtype)
