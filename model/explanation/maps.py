"""Maps over the patch grid, made of rows of attention or of what each token mattered."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model.config import ViTConfig
from model.outputs import AttentionHead, AttentionMap, MapRequest

Floats = NDArray[np.float32]

_TINY: Final = float(np.finfo(np.float64).tiny)

# Patches along a grid's shorter side, at most, where a token has seen much more than its patch.
_COARSE: Final = 8


def is_coarse(config: ViTConfig) -> bool:
    """Return whether the grid is so small that relevance goes further back: see
    `model.explanation.relevance`.
    """
    return min(config.grid) <= _COARSE


def attention_maps(
    attention: Floats,
    layers: Sequence[int],
    requests: Sequence[MapRequest | None],
    config: ViTConfig,
) -> dict[int, AttentionMap]:
    """Return the maps of the requests that are of a row of attention, by their places.

    Requests of the same layer and head, however mixed the batch, are computed in one operation.

    Args:
        attention: rows of these layers, float32 [B, len(layers), heads, N].
    """
    groups: dict[tuple[int, AttentionHead], dict[int, MapRequest]] = {}
    for index, request in enumerate(requests):
        if request is not None and request.layer is not None and request.head is not None:
            groups.setdefault((request.layer, request.head), {})[index] = request
    placed: dict[int, AttentionMap] = {}
    for (layer, head), members in groups.items():
        rows = attention[list(members), layers.index(layer)]
        maps, kept_mass = cls_map(
            rows, head=head, prefix_tokens=config.prefix_tokens, grid=config.grid
        )
        for (member, request), values, kept in zip(
            members.items(), maps, kept_mass.tolist(), strict=True
        ):
            placed[member] = AttentionMap(request, values, kept)
    return placed


def cls_map(
    rows: Floats, *, head: AttentionHead, prefix_tokens: int, grid: tuple[int, int]
) -> tuple[Floats, Floats]:
    """Combine the heads, drop the prefix tokens, and divide the rest by its sum.

    Args:
        rows: [B, heads, N] float32, each a softmax over N = prefix_tokens + rows*columns tokens.
        prefix_tokens: number of tokens before the patches (CLS, distillation, registers).
        grid: (rows, columns) of patches; need not be square.

    Returns:
        float32 [B, rows, columns], each map summing to 1; float32 [B], the sum of each before the
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
    # A head may give the patches nothing at all; the smallest float keeps its map finite.
    values = patches / np.maximum(kept, np.finfo(np.float32).tiny)[:, np.newaxis]
    return values.reshape(-1, *grid), kept


def token_maps(tokens: Floats, config: ViTConfig) -> tuple[Floats, Floats]:
    """Drop the prefix tokens and divide the rest by its sum, in NumPy.

    On so few numbers it takes about half of the time of torch's operations.

    Args:
        tokens: [B, N], not negative.

    Returns:
        [B, rows, columns], each map summing to 1, or even where there is nothing to divide; and
        [B], the share that fell on patches.
    """
    exact = tokens.astype(np.float64)  # gradients may be tiny, and their scale does not matter
    patches = exact[:, config.prefix_tokens :]
    return _divided(patches, patches.sum(axis=1), exact.sum(axis=1), config)


def sharpened_maps(relevance: Floats, config: ViTConfig) -> tuple[Floats, Floats]:
    """Return what `token_maps` does, of relevance that may be negative.

    Unless the grid is coarse, patches are smoothed by a Gaussian of a 32nd of its shorter side,
    less than half a patch of 14. Of the result the positive part is squared, which lets the many
    patches that brought a little fade against those that brought much, and does not change their
    order or the share of all patches.

    Args:
        relevance: [B, N].
    """
    prefix, exact = config.prefix_tokens, relevance.astype(np.float64)
    smooth = exact[:, prefix:].reshape(-1, *config.grid)
    if not is_coarse(config):
        down, across = (gaussian(size, min(config.grid) / 32) for size in config.grid)
        with np.errstate(
            invalid="ignore"
        ):  # of numbers that are not finite, whose images have an error and no map
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
    """Return maps of what is shown, [B, patches], and the share that the patches kept of the total,
    [B].
    """
    whole = shown.sum(axis=1, keepdims=True)
    maps = np.where(whole > 0, shown / np.maximum(whole, _TINY), 1 / shown.shape[1])
    share = kept / np.maximum(total, _TINY)
    return maps.astype(np.float32).reshape(-1, *config.grid), share.astype(np.float32)


@lru_cache(maxsize=8)
def gaussian(size: int, sigma: float) -> NDArray[np.float64]:
    """Return the matrix that smooths along an axis of patches, [size, size]; each row sums to 1."""
    places = np.arange(size)
    weights = np.exp(-(((places[:, None] - places) / sigma) ** 2) / 2)
    rows: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return rows
