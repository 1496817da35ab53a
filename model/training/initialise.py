"""Initialisation of the model that a run starts with: weights for a short schedule, or a checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model.checkpoint.checkpoint import check_tensors
from model.config import ViTConfig
from model.errors import CheckpointError, TrainingError
from model.network.layers.position import sincos2d_position_embedding
from model.network.vit import VisionTransformer
from model.training.recipe import Recipe
from model.training.training_data import TrainingData

_TEMPERATURE: Final = 100.0
"""The lowest frequency of the code is 1/_TEMPERATURE; grids here are small, so this is far below the papers' 10,000."""
_POSITION_SCALE: Final = 0.3
_PATCH_SCALE: Final = 0.5
_WHITENING_IMAGES: Final = 5000
_WHITENING_PIXELS: Final = _WHITENING_IMAGES * 32 * 32
_WHITENING_FLOOR: Final = 1e-2
"""Added to the patches' variances, so that directions without content are not blown up."""


def initial_model(
    recipe: Recipe, config: ViTConfig, data: TrainingData, initial: Mapping[str, Tensor] | None
) -> VisionTransformer:
    """Make the float32 model that training starts with, on the CPU.

    Args:
        data: its images may decide where the patch embedding starts.
        initial: all weights by the model's parameter names; None: the recipe's initialisation.

    Raises:
        TrainingError: initial weights that are not the model's.
    """
    model = VisionTransformer(config, drop_path=recipe.drop_path)
    if initial is not None:
        _copy_weights(model, initial)
        return model
    model.reset_parameters(torch.Generator().manual_seed(recipe.seed))
    if recipe.initialisation.positions == "sincos":
        start_positions(model)
    if recipe.initialisation.whiten_patches:
        start_patches(model, data.normalise(whitening_sample(data.pixels)).cpu())
    return model


@torch.no_grad()
def _copy_weights(model: VisionTransformer, weights: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    try:
        check_tensors("initial weights", weights, {name: tuple(p.shape) for name, p in parameters.items()})
    except CheckpointError as error:
        raise TrainingError(str(error)) from error
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def sincos_positions(grid: tuple[int, int], width: int) -> Tensor:
    """Return the 2D sine-cosine code: a quarter of the width each for sin and cos of the row and of the column.

    Chen et al. 2021 (MoCo v3), https://arxiv.org/abs/2104.02057; values in -1...1.

    Args:
        grid: (rows, columns) of patches.

    Returns:
        float32 [rows*columns, width].

    Raises:
        TrainingError: the width is no multiple of four.
    """
    if width % 4:
        raise TrainingError(f"width {width} is not a multiple of 4, which sine-cosine positions need")
    quarter = width // 4
    # The lowest frequency here would be the next one after the last.
    code = sincos2d_position_embedding(grid, width, temperature=_TEMPERATURE ** ((quarter - 1) / quarter))[0]
    return code.roll(width // 2, dims=1)  # that one begins with the column


def whitening_filters(pixels: Tensor, patch_size: int) -> Tensor:
    """Return filters that give uncorrelated outputs of unit variance on these pictures' patches.

    They are the eigenvectors of the patches' covariance over the root of their eigenvalues, as in
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
    """Return as many pictures of [N, C, H, W] as the patches' covariance needs, as a view: only they are read.

    They are the first 5000, or fewer of pictures larger than 32 x 32 so that they fit in memory as float32; these
    come from all over the data, which may be sorted by class.
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
