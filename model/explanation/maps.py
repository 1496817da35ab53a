"""Maps over the patch grid, from rows of attention or from the relevance of each token."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model.config import ViTConfig
from model.outputs import AttentionHead, AttentionMap, MapRequest

Floats = NDArray[np.float32]

_TINY: Final = float(np.finfo(np.float64).tiny)

# Grids of at most this many patches along the shorter side are coarse: a token has seen much more
# than its own patch.
_COARSE: Final = 8


def is_coarse(config: ViTConfig) -> bool:
    """Return whether the grid is so small that relevance goes further back.

    See `model.explanation.relevance`.
    """
    return min(config.grid) <= _COARSE


def attention_maps(
    attention: Floats,
    layers: Sequence[int],
    requests: Sequence[MapRequest | None],
    config: ViTConfig,
) -> dict[int, AttentionMap]:
    """Return the maps of the requests for a row of attention, by the index of the request.

    Requests of the same layer and attention head are computed together, even in a mixed batch.

    Args:
        attention: rows of these layers, float32 [B, len(layers), heads, N].
    """
    groups: dict[tuple[int, AttentionHead], dict[int, MapRequest]] = {}
    for index, request in enumerate(requests):
        if request is not None and request.layer is not None and request.attention_head is not None:
            groups.setdefault((request.layer, request.attention_head), {})[index] = request
    maps: dict[int, AttentionMap] = {}
    for (layer, head), members in groups.items():
        rows = attention[list(members), layers.index(layer)]
        values, kept_mass = cls_map(
            rows, head=head, prefix_tokens=config.prefix_tokens, grid=config.grid
        )
        for row, (index, request) in enumerate(members.items()):
            maps[index] = AttentionMap(request, values[row], float(kept_mass[row]))
    return maps


def cls_map(
    rows: Floats, *, head: AttentionHead, prefix_tokens: int, grid: tuple[int, int]
) -> tuple[Floats, Floats]:
    """Combine the attention heads, drop the prefix tokens, and divide the rest by its sum.

    Args:
        rows: [B, heads, N] float32, each a softmax over N = prefix_tokens + rows*columns tokens.
        prefix_tokens: number of tokens before the patches (CLS, distillation, registers).
        grid: (rows, columns) of patches; may be non-square.

    Returns:
        float32 [B, rows, columns], each map summing to 1; float32 [B], the sums before the
        division.
    """
    if head == "mean":
        row = rows.mean(axis=1)
    elif head == "max":
        row = rows.max(axis=1)
    else:
        row = rows[:, head]
    patches = row[:, prefix_tokens:]
    kept = patches.sum(axis=-1)
    # If the patches get nothing, dividing by the smallest float keeps the map finite.
    values = patches / np.maximum(kept, np.finfo(np.float32).tiny)[:, np.newaxis]
    return values.reshape(-1, *grid), kept


def token_maps(tokens: Floats, config: ViTConfig) -> tuple[Floats, Floats]:
    """Drop the prefix tokens and divide the rest by its sum, in NumPy.

    For so few numbers, NumPy takes about half the time of torch.

    Args:
        tokens: [B, N], not negative.

    Returns:
        [B, rows, columns]: each map sums to 1, and is uniform if all values are 0. And [B], the
        share that fell on patches.
    """
    exact = tokens.astype(np.float64)  # gradients of any scale may be tiny
    patches = exact[:, config.prefix_tokens :]
    return _divided(patches, patches.sum(axis=1), exact.sum(axis=1), config)


def relevance_maps(
    relevance: Floats, labels: Sequence[int], config: ViTConfig
) -> list[AttentionMap]:
    """Return the maps of relevance [B, N] for these classes, one for each image."""
    values, kept_mass = sharpened_maps(relevance, config)
    return [
        AttentionMap(MapRequest("relevance", label), values[row], float(kept_mass[row]))
        for row, label in enumerate(labels)
    ]


def sharpened_maps(relevance: Floats, config: ViTConfig) -> tuple[Floats, Floats]:
    """Return maps like `token_maps`, from relevance that may be negative.

    Unless the grid is coarse, patches are first smoothed by a Gaussian. Its standard deviation is a
    32nd of the shorter side: less than half a patch of 14. Then the positive part is squared. This
    fades the many patches with a small contribution, but keeps the order of patches and the share
    of all patches.

    Args:
        relevance: [B, N].
    """
    prefix = config.prefix_tokens
    exact = relevance.astype(np.float64)
    smooth = exact[:, prefix:].reshape(-1, *config.grid)
    if not is_coarse(config):
        down, across = (gaussian(size, min(config.grid) / 32) for size in config.grid)
        # An image with values that are not finite gets an error instead of a map.
        with np.errstate(invalid="ignore"):
            smooth = down @ smooth @ across.T
    patches = np.maximum(smooth, 0).reshape(-1, config.grid[0] * config.grid[1])
    kept = patches.sum(axis=1)
    squared = np.square(patches / np.maximum(patches.max(axis=1, keepdims=True), _TINY))
    return _divided(squared, kept, kept + np.maximum(exact[:, :prefix], 0).sum(axis=1), config)


def _divided(
    shown: NDArray[np.float64],
    kept: NDArray[np.float64],
    total: NDArray[np.float64],
    config: ViTConfig,
) -> tuple[Floats, Floats]:
    """Return maps of `shown`, divided by its sum, and the share of `kept` in `total`.

    Args:
        shown: values of the patches, [B, patches].
        kept, total: sums over the patches and over all tokens, [B].
    """
    whole = shown.sum(axis=1, keepdims=True)
    maps = np.where(whole > 0, shown / np.maximum(whole, _TINY), 1 / shown.shape[1])
    share = kept / np.maximum(total, _TINY)
    return maps.astype(np.float32).reshape(-1, *config.grid), share.astype(np.float32)


@lru_cache(maxsize=8)
def gaussian(size: int, sigma: float) -> NDArray[np.float64]:
    """Return the matrix that smooths along an axis of patches, [size, size]; rows sum to 1."""
    positions = np.arange(size)
    weights = np.exp(-(((positions[:, None] - positions) / sigma) ** 2) / 2)
    rows: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return rows
