"""Analyses of a trained network: the patch filters, the positions, and how far attention reaches.

They are those of figure 7 of the ViT paper: Dosovitskiy et al. 2020, section 4.5, https://arxiv.org/abs/2010.11929.
They are no part of serving: no hooks, no second mode of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from model.config import ViTConfig
from model.errors import InputError
from model.network.layers.attention import Attention
from model.network.layers.block import Block
from model.network.layers.patch_embed import PatchEmbed
from model.network.vit import VisionTransformer


class PatchFilters(NamedTuple):
    """Principal components of the patch-embedding filters.

    Attributes:
        components: float32 [M, C, P, P], each of length 1; their signs have no meaning.
        explained: float32 [M], the share of the filters' variance that lies along each, falling.
    """

    components: Tensor
    explained: Tensor


def patch_filters(model: VisionTransformer, count: int = 28) -> PatchFilters:
    """Return the directions in pixel space along which the D patch filters differ most.

    The filters are samples with C*P*P values each; their mean is subtracted before the decomposition.

    Args:
        model: any but a hybrid.
        count: how many components, 28 in the paper; fewer where the filters have fewer.

    Raises:
        InputError: the patches are those of a convolutional stem's features, not of pixels.
    """
    config = model.config
    if config.stem is not None or config.conv_stem is not None:
        raise InputError("checkpoint", "no patch filters: the patches are features of a stem of convolutions")
    patch = model.patch_embed
    weight = (patch.proj if isinstance(patch, PatchEmbed) else patch.get_submodule("proj")).weight
    assert isinstance(weight, Tensor)
    filters = weight.detach().double().reshape(config.width, -1)  # [D, C*P*P] in both forms of the embedding
    filters = filters - filters.mean(dim=0)
    _, singular, directions = torch.linalg.svd(filters, full_matrices=False)
    variance = singular.square()
    shares = variance / variance.sum().clamp_min(torch.finfo(variance.dtype).tiny)
    shape = (-1, config.in_channels, config.patch_size, config.patch_size)
    return PatchFilters(directions[:count].float().reshape(shape), shares[:count].float())


def position_similarity(model: VisionTransformer) -> Tensor:
    """Return the cosine similarity of each learned position embedding to all, prefix tokens left out.

    It is float32 [gh, gw, gh, gw]; [i, j] is the map of the patch in row i and column j.

    Raises:
        InputError: the model has no learned embedding a position.
    """
    config = model.config
    if model.pos_embed is None or config.position_embedding != "learned":
        kind = "relative biases" if config.relative_position_bias else config.position_embedding
        raise InputError("checkpoint", f"no position similarity: positions are not learned embeddings ({kind})")
    prefix = config.prefix_tokens if config.position_prefix else 0
    embedding = torch.nn.functional.normalize(model.pos_embed.detach()[0, prefix:].double(), dim=1)
    return (embedding @ embedding.T).float().reshape(*config.grid, *config.grid)


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
