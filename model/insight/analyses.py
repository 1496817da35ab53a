"""How far attention reaches in a trained network: figure 7 (right) of the ViT paper.

Dosovitskiy et al. 2020, section 4.5, https://arxiv.org/abs/2010.11929. It is no part of serving: no hooks, no second
mode of the model.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from model.config import ViTConfig
from model.errors import InputError
from model.network.layers.attention import Attention
from model.network.layers.block import Block
from model.network.vit import VisionTransformer


@torch.inference_mode()
def mean_attention_distance(model: VisionTransformer, batches: Iterable[Tensor], *, max_scores: int = 2**23) -> Tensor:
    """Return the mean attention distance by layer and head: from query to key, weighted by attention.

    As figure 7 (right) of the ViT paper shows it (appendix D.7); by layer and depth as in Raghu et al. 2021,
    https://arxiv.org/abs/2108.08810. It is the mean over all patch queries and all images. Prefix tokens have no place
    in the picture: they are neither queries nor keys here, and the weights of each query's patch keys are divided by
    their sum.

    Args:
        model: in evaluation mode; its forward pass is repeated block by block.
        batches: normalised pixels [B, C, H, W] as the model takes them; a single batch is alive at a time, and of
            its attention at most some rows of a layer.
        max_scores: how many attention weights may be alive at once.

    Returns:
        float64 [layers, heads] in pixels of the model's input, between patch centres, on the CPU.

    Raises:
        InputError: no images.
    """
    config = model.config
    places = _centres(config.grid, config.patch_size)
    total = torch.zeros(config.depth, config.heads, dtype=torch.float64)
    images = 0
    for pixels in batches:
        x = model.embed(pixels)
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            total[layer] += _summed_distance(
                block.attn, block.attention_input(x), config.prefix_tokens, places, max_scores
            ).cpu()
            if layer < config.depth - 1:
                x = block(x)[0]
        images += len(pixels)
    if not images:
        raise InputError("images", "no images to measure attention on")
    return total / images


def even_attention_distance(config: ViTConfig) -> float:
    """Return the mean attention distance, in pixels, of attention that is equal for all patches."""
    places = _centres(config.grid, config.patch_size)
    return float(torch.stack([(places - place).norm(dim=1).mean() for place in places]).double().mean())


def _centres(grid: tuple[int, int], patch_size: int) -> Tensor:
    """Return the patch centres [gh*gw, 2], (row, column) in pixels, but for a common offset."""
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    return torch.stack((rows, columns), dim=-1).reshape(-1, 2).float() * patch_size


def _summed_distance(attention: Attention, x: Tensor, prefix: int, places: Tensor, max_scores: int) -> Tensor:
    """Map [B, N, D], normalised as in the block, to float64 [heads]: mean over patch queries, sum over images."""
    q, k, _ = attention.project(x)
    q, k = q[:, :, prefix:] * attention.head_dim**-0.5, k[:, :, prefix:]
    places, bias = places.to(x.device), attention.bias()
    patches = len(places)
    rows = max(1, max_scores // (attention.heads * patches))
    summed = torch.zeros(attention.heads, dtype=torch.float64, device=x.device)
    for start in range(0, patches, rows):
        queries = slice(start, start + rows)
        distance = torch.cdist(places[queries], places, compute_mode="donot_use_mm_for_euclid_dist")
        for q_i, k_i in zip(q[:, :, queries], k, strict=True):
            scores = q_i @ k_i.transpose(-2, -1)  # [heads, queries, patches]
            if bias is not None:
                scores = scores + bias[0, :, prefix:, prefix:][:, queries]
            # A softmax over the patch keys alone equals that over all keys, divided by its sum over patch keys.
            weights = scores.float().softmax(dim=-1)
            summed += (weights * distance).sum(dim=(1, 2), dtype=torch.float64)
    return summed / patches
