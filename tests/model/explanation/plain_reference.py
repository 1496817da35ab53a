"""A plain forward pass in which every attention matrix is a tensor that keeps its gradient.

It uses the network's parameters and norms, and not `model.explanation`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from model.config import ViTConfig
from model.network.layers.attention import Attention
from model.network.vit import VisionTransformer
from tests.model.blocks import blocks


class Reference(NamedTuple):
    """The result of a plain forward pass.

    Attributes:
        attention: of each block, [B, heads, N, N].
        pool: of the pooling query, [B, heads, 1, seen], or None.
        outputs: of each block, [B, N, D].
        logits: [B, classes].
    """

    attention: list[Tensor]
    pool: Tensor | None
    outputs: list[Tensor]
    logits: Tensor


def forward(model: VisionTransformer, pixels: Tensor) -> Reference:
    """Run the model on pixels [B, C, H, W]."""
    x = model.embed(pixels)
    attention = []
    outputs = []
    for block in blocks(model):
        if model.config.norm_order == "post":
            mixed, weights = _attend(block.attn, x)
            x = block.norm1(x + block.ls1(mixed))
            x = block.norm2(x + block.ls2(block.mlp(x)))
        elif model.config.norm_order == "res_post":
            mixed, weights = _attend(block.attn, x)
            x = x + block.ls1(block.norm1(mixed))
            x = x + block.ls2(block.norm2(block.mlp(x)))
        else:
            mixed, weights = _attend(block.attn, block.norm1(x))
            x = x + block.ls1(mixed)
            x = x + block.ls2(block.mlp(block.norm2(x)))
        attention.append(weights)
        outputs.append(x)
    logits, pool = read(model, x)
    return Reference(attention, pool, outputs, logits)


def first_row(config: ViTConfig, count: int) -> Tensor:
    """Return the share of each token in the pooled vector of a rule without a query: [count, N]."""
    row = torch.zeros(config.tokens)
    pooled = torch.arange(config.tokens) >= (0 if config.pool_prefix else config.prefix_tokens)
    if config.pool == "cls":
        row[0] = 1
        if config.distillation_head:
            row[:2] = 0.5
    else:
        row[pooled] = 1 / int(pooled.sum())
    if config.pool == "cls_mean":
        row = row / 2 + 0.5 * torch.nn.functional.one_hot(torch.tensor(0), config.tokens)
    return row.repeat(count, 1)


def attention_weights(layer: Attention, x: Tensor) -> Tensor:
    """Return the attention [B, heads, N, N] of tokens [B, N, D] after the block's first norm."""
    width = layer.qkv.out_features // 3
    heads = layer.heads
    q, k, _ = (
        part.unflatten(2, (heads, width // heads)).transpose(1, 2)
        for part in layer.qkv(x).split(width, dim=2)
    )
    q, k = (turned(layer, part) for part in (layer.q_norm(q), layer.k_norm(k)))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / (width // heads) ** 0.5
    if layer.relative_position_bias_table is not None:
        for head in range(heads):
            scores[:, head] += layer.relative_position_bias_table[:, head][
                layer.relative_position_index
            ]
    return torch.softmax(scores, dim=-1)


def turned(layer: Attention, x: Tensor) -> Tensor:
    """Return queries or keys [B, heads, N, head_dim], rotated as complex numbers patch by patch."""
    rotary = layer.rotary
    if rotary is None:
        return x
    positions = rotary.positions
    half = x.shape[3] // 2
    values = torch.complex(x[..., :half], x[..., half:])
    parts = [values[:, :, index] for index in range(rotary.prefix_tokens)]
    for index in range(rotary.grid[0] * rotary.grid[1]):
        places = []
        for axis, place in enumerate(divmod(index, rotary.grid[1])):
            size = rotary.grid[axis]
            scale = (
                1.0 if positions.reference_grid is None else positions.reference_grid[axis] / size
            )
            counted = (place + positions.offset) * scale
            places.append(
                2 * math.pi * ((2 * place + 1) / size - 1) if positions.centred else counted
            )
        if rotary.frequencies is None:
            falling = torch.tensor(
                [positions.temperature ** (-pair / (half // 2)) for pair in range(half // 2)]
            )
            angle = torch.cat([places[0] * falling, places[1] * falling])
        else:
            angle = places[0] * rotary.frequencies[0] + places[1] * rotary.frequencies[1]
        parts.append(
            values[:, :, rotary.prefix_tokens + index] * torch.polar(torch.ones_like(angle), angle)
        )
    result = torch.stack(parts, dim=2)
    return torch.cat([result.real, result.imag], dim=3)


def _attend(layer: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    v = (
        layer.qkv(x)[..., layer.qkv.out_features // 3 * 2 :]
        .unflatten(2, (layer.heads, -1))
        .transpose(1, 2)
    )
    weights = attention_weights(layer, x)
    weights.retain_grad()
    return layer.proj(layer.norm(torch.einsum("bhqk,bhkd->bqhd", weights, v).flatten(2))), weights


def read(model: VisionTransformer, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the logits of the last block's output [B, N, D], and the pooling query's attention."""
    config = model.config
    x = model.norm(x)
    seen = x if config.pool_prefix else x[:, config.prefix_tokens :]
    weights = None
    if config.pool == "attention":
        pool = model.attn_pool
        assert pool is not None
        heads = config.pool_heads or config.heads
        width = config.width
        q = pool.q(pool.latent).unflatten(2, (heads, width // heads))[0, 0]
        k, v = (
            part.unflatten(2, (heads, width // heads)) for part in pool.kv(seen).split(width, dim=2)
        )
        weights = (
            (torch.einsum("hd,bkhd->bhk", q, k) / (width // heads) ** 0.5)
            .softmax(dim=-1)
            .unsqueeze(2)
        )
        weights.retain_grad()
        pooled = pool.proj(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(1))
        pooled = pooled + pool.mlp(pool.norm(pooled))
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
    pooled = model.projection(model.fc_norm(pooled))
    if config.normalized_head:
        pooled = pooled / pooled.norm(dim=1, keepdim=True)
    logits = model.head(pooled)
    if model.head_dist is not None:
        logits = 0.5 * logits + 0.5 * model.head_dist(x[:, 1])
    return logits, weights
