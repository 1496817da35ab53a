"""The start of a run: a checkpoint with a new head, or an architecture and weights for a short schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model.checkpoint import Checkpoint, load_checkpoint
from model.config import PreprocessConfig, Size, ViTConfig
from model.errors import TrainingError
from model.network.layers.position import sincos2d_position_embedding
from model.network.vit import VisionTransformer
from model.training.recipe import Recipe

_TEMPERATURE: Final = 100.0
"""The lowest frequency of the code is above 1/_TEMPERATURE; grids are small, so it is far below the papers' 10,000."""
_POSITION_SCALE: Final = 0.3
_WHITENING_FLOOR: Final = 1e-2
"""Added to the patches' variances, so that directions without content are not blown up."""


@dataclass(frozen=True)
class Start:
    """The model that a run trains, before its first step.

    Attributes:
        config: the architecture, fitted to the data's classes.
        preprocess: what the service will do; from scratch, mean and std are yet to be measured.
        weights: float32 on the CPU by name; None from scratch.
        name: name of the checkpoint that is fine-tuned; None from scratch.
    """

    config: ViTConfig
    preprocess: PreprocessConfig
    weights: Mapping[str, Tensor] | None = None
    name: str | None = None


def start_from(recipe: Recipe, classes: int, image_size: Size | None) -> Start:
    """Make a recipe's start for data of `classes` classes.

    Args:
        classes: number of classes of the new head.
        image_size: (rows, columns) of the data's pictures, where all are of one size.

    Raises:
        CheckpointError: the checkpoint cannot be read, or not be resized.
        TrainingError: neither a checkpoint nor an architecture, or it does not fit the data.
    """
    if recipe.checkpoint is not None:
        return _from_checkpoint(recipe, recipe.checkpoint, classes)
    if recipe.architecture is None:
        raise TrainingError("recipe: neither an architecture to train from scratch nor a checkpoint to fine-tune")
    size = recipe.image_size or image_size
    if size is None:
        raise TrainingError("recipe: image_size: needed to train from scratch on pictures of any size")
    half = (0.5, 0.5, 0.5)
    preprocess = PreprocessConfig(
        size=size, resize="shortest_edge", resize_size=size, interpolation="bicubic", mean=half, std=half
    )
    return Start(recipe.architecture.config(size, classes), preprocess)


def read_start(recipe: Recipe, source: str) -> Checkpoint:
    """Read the checkpoint that a recipe starts from, whose head is to be replaced.

    Raises:
        CheckpointError: it cannot be read, or not be resized.
    """
    return load_checkpoint(
        source,
        image_size=recipe.image_size,
        preprocess=recipe.checkpoint_preprocess,
        labels="numbers",  # the old head's labels go with it, and some formats have none
        architecture=recipe.checkpoint_architecture,
    )


def _from_checkpoint(recipe: Recipe, source: str, classes: int) -> Start:
    checkpoint = read_start(recipe, source)
    if checkpoint.vit.in_channels != 3:
        raise TrainingError(f"{source}: takes greyscale pictures; only models of RGB pictures can be fine-tuned")
    config = checkpoint.vit.model_copy(update={"num_classes": classes})
    weights = dict(checkpoint.build().state_dict())  # built, so that all of them are checked
    for name in [name for name in weights if name.startswith(("head.", "head_dist."))]:
        weights[name] = torch.zeros(classes, *weights[name].shape[1:])
    return Start(config, checkpoint.preprocess, weights, checkpoint.name)


def initial_model(config: ViTConfig, seed: int, initial: Mapping[str, Tensor] | None) -> VisionTransformer:
    """Make the float32 model that training starts with, on the CPU.

    Args:
        initial: all weights by the model's parameter names; None: drawn by the seed, and positions a sine-cosine code.
    """
    model = VisionTransformer(config)
    if initial is not None:
        model.load_state_dict(initial)
        return model
    model.reset_parameters(torch.Generator().manual_seed(seed))
    start_positions(model)
    return model


def whitening_filters(pixels: Tensor, patch_size: int) -> Tensor:
    """Return filters that give uncorrelated outputs of unit variance on these pictures' patches.

    They are the eigenvectors of the patches' covariance over the root of their eigenvalues, as in
    https://arxiv.org/abs/2404.00498, section 3.2.

    Args:
        pixels: float32 [N, C, H, W], normalised.

    Returns:
        float32 [C*patch_size**2, C, patch_size, patch_size], most variance first.
    """
    patches = F.unfold(pixels, patch_size, stride=patch_size).transpose(1, 2).flatten(0, 1)
    variance, direction = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters: Tensor = (direction / (variance.clamp_min(0) + _WHITENING_FLOOR).sqrt()).T.flip(0)
    return filters.reshape(-1, pixels.shape[1], patch_size, patch_size)


@torch.no_grad()
def start_positions(model: VisionTransformer) -> None:
    """Put a 2D sine-cosine code into the patches' position embeddings.

    Its frequencies are those of MoCo v3 (Chen et al. 2021, https://arxiv.org/abs/2104.02057): of q of them, the lowest
    is `_TEMPERATURE` to the power -(q - 1) / q. The code of the row comes first.
    """
    config = model.config
    assert model.pos_embed is not None  # recipes train models with learned positions
    quarter = config.width // 4
    code = sincos2d_position_embedding(config.grid, config.width, temperature=_TEMPERATURE ** ((quarter - 1) / quarter))
    model.pos_embed[0, config.prefix_tokens :] = _POSITION_SCALE * code[0].roll(2 * quarter, dims=1)
