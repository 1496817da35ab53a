"""The start of a run: an architecture without weights, or a checkpoint with a new head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from model.checkpoint import load_checkpoint
from model.config import PreprocessConfig, Size, ViTConfig
from model.errors import TrainingError
from model.training.recipe import Recipe


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


def _from_checkpoint(recipe: Recipe, source: str, classes: int) -> Start:
    checkpoint = load_checkpoint(
        source,
        image_size=recipe.image_size,
        preprocess=recipe.checkpoint_preprocess,
        labels="numbers",  # the old head's labels go with it, and some formats have none
        architecture=recipe.checkpoint_architecture,
    )
    if checkpoint.config.in_channels != 3:
        raise TrainingError(f"{source}: takes greyscale pictures; only models of RGB pictures can be fine-tuned")
    config = checkpoint.config.model_copy(update={"num_classes": classes})
    weights = dict(checkpoint.build().state_dict())  # built, so that all of them are checked
    for name in [name for name in weights if name.startswith(("head.", "head_dist."))]:
        weights[name] = torch.zeros(classes, *weights[name].shape[1:])
    return Start(config, checkpoint.preprocess, weights, checkpoint.name)
