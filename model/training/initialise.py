"""Better than random starts for a short schedule; the architecture stays the plain one."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model.errors import TrainingError
from model.network.vit import VisionTransformer

_TEMPERATURE: Final = 100.0
"""Lowest frequency of the code is 1/_TEMPERATURE; grids here are small, so far below the papers' 10,000."""
_POSITION_SCALE: Final = 0.3
_PATCH_SCALE: Final = 0.5
_WHITENING_IMAGES: Final = 5000
_WHITENING_PIXELS: Final = _WHITENING_IMAGES * 32 * 32
_WHITENING_FLOOR: Final = 1e-2
"""Added to the patches' variances, so that directions without content are not blown up."""


def sincos_positions(grid: tuple[int, int], width: int) -> Tensor:
    """2D sine-cosine code: a quarter of the width each for sin and cos of the row and of the column.

    Chen et al. 2021 (MoCo v3), https://arxiv.org/abs/2104.02057; values in -1...1.

    Args:
        grid: (rows, columns) of patches.
        width: of the tokens.

    Returns:
        float32 [rows*columns, width].

    Raises:
        TrainingError: the width is no multiple of four.
    """
    if width % 4:
        raise TrainingError(f"width {width} is not a multiple of 4, which sine-cosine positions need")
    quarter = width // 4
    frequency = _TEMPERATURE ** -(torch.arange(quarter) / quarter)
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    row, column = rows.reshape(-1, 1) * frequency, columns.reshape(-1, 1) * frequency
    return torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], dim=1)


def whitening_filters(pixels: Tensor, patch_size: int) -> Tensor:
    """Filters that give uncorrelated outputs of unit variance on these pictures' patches.

    The eigenvectors of the patches' covariance over the root of their eigenvalues, as in
    https://arxiv.org/abs/2404.00498, section 3.2.

    Args:
        pixels: float32 [N, C, H, W], normalised; H, W multiples of `patch_size`.

    Returns:
        float32 [C*patch_size**2, C, patch_size, patch_size], most variance first.
    """
    patches = F.unfold(pixels, patch_size, stride=patch_size).transpose(1, 2).flatten(0, 1)
    variance, direction = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters: Tensor = (direction / (variance.clamp_min(0) + _WHITENING_FLOOR).sqrt()).T.flip(0)
    return filters.reshape(-1, pixels.shape[1], patch_size, patch_size)


def whitening_sample(pixels: Tensor) -> Tensor:
    """As many pictures as the patches' covariance needs, and no more than fit in memory as float32.

    Args:
        pixels: [N, C, H, W]; only what is chosen is read.

    Returns:
        A view: the first 5000, or fewer of pictures larger than 32 x 32, these from all over the data,
        which may be sorted by class.
    """
    count = max(1, _WHITENING_PIXELS // (pixels.shape[2] * pixels.shape[3]))
    if count >= _WHITENING_IMAGES:
        return pixels[:_WHITENING_IMAGES]
    return pixels[:: max(1, len(pixels) // count)][:count]


@torch.no_grad()
def start_positions(model: VisionTransformer) -> None:
    """Put the sine-cosine code into the patches' position embeddings."""
    config = model.config
    assert model.pos_embed is not None  # recipes train models with learned positions
    model.pos_embed[0, config.prefix_tokens :] = _POSITION_SCALE * sincos_positions(config.grid, config.width)


@torch.no_grad()
def start_patches(model: VisionTransformer, pixels: Tensor) -> None:
    """Put whitening filters and their negatives, as many as fit, into the patch embedding.

    Args:
        pixels: float32 [N, C, H, W], normalised training pictures.
    """
    weight = model.patch_embed.proj.weight  # [width, C, patch, patch]
    filters = whitening_filters(pixels, model.config.patch_size)[: len(weight) // 2]
    signed = torch.cat([filters, -filters])
    weight[: len(signed)] = _PATCH_SCALE * signed
