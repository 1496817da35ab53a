"""Small runs of the training loop, and what to compare them by."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from model.data.cifar10 import CLASSES, IMAGE_SIZE
from model.training.loop import Trainer
from model.training.recipe import Recipe
from model.training.run_folder import EpochMetrics
from model.training.training_data import TrainingData

CPU = torch.device("cpu")

EVERYTHING: Mapping[str, Any] = {
    "ema_decay": 0.95,
    "label_smoothing": 0.1,
    "architecture.conv_stem": {"widths": (8, 8), "kernels": (3, 3), "strides": (2, 1)},
    "drop_path": 0.1,
    "optimiser.layer_decay": 0.8,
    "optimiser.clip_norm": 1.0,
    "augmentation.resized_crop": 0.5,
    "augmentation.rand_augment": 2,
    "augmentation.erasing": 0.5,
    "mixing.mixup": 0.8,
    "mixing.cutmix": 1.0,
    "mixing.probability": 0.8,
    "patch_dropout.rate": 0.25,
    "patch_dropout.until": 0.7,
}
"""Every part of a recipe that draws random numbers or keeps state."""


class Interrupted(Exception):
    """The end of a run that has epochs left."""


def make_trainer(
    recipe: Recipe,
    data: TrainingData,
    folder: Path,
    initial: Mapping[str, torch.Tensor] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Trainer:
    assert recipe.architecture is not None
    config = recipe.architecture.config(IMAGE_SIZE, CLASSES)
    return Trainer(recipe, config, data, folder, CPU, initial, clock=clock)


def trained(recipe: Recipe, data: TrainingData, folder: Path) -> Trainer:
    trainer = make_trainer(recipe, data, folder)
    trainer.run(progress=False)
    return trainer


def resumed(recipe: Recipe, data: TrainingData, folder: Path) -> Trainer:
    trainer = make_trainer(recipe, data, folder)
    trainer.load()
    trainer.run(progress=False)
    return trainer


def interrupted_after(recipe: Recipe, data: TrainingData, folder: Path, epochs: int) -> None:
    def stop(metrics: EpochMetrics) -> None:
        if metrics.epoch == epochs:
            raise Interrupted

    with pytest.raises(Interrupted):
        make_trainer(recipe, data, folder).run(stop, progress=False)


def same(one: Trainer, other: Trainer) -> bool:
    """Bit for bit: present and best weights, and what was measured."""
    return (
        same_tensors(one.weights, other.weights)
        and one.best_epoch == other.best_epoch
        and same_tensors(one.best_weights, other.best_weights)
        and [(row.train_loss, row.validation_loss) for row in one.history]
        == [(row.train_loss, row.validation_loss) for row in other.history]
    )


def same_tensors(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
