"""Small runs of the training loop, and their comparison."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from model.extensions.evaluation.cifar10 import CLASSES, IMAGE_SIZE
from model.extensions.training.loop import Trainer
from model.extensions.training.recipe import Recipe
from model.extensions.training.run_folder import EpochMetrics
from model.extensions.training.training_data import TrainingData

CPU = torch.device("cpu")

TAUGHT: Mapping[str, Any] = {
    "architecture.conv_stem": {
        "widths": (24, 24, 24, 8, 8),
        "kernels": (3, 3, 3, 3, 3),
        "strides": (1, 1, 1, 1, 1),
        "pools": (1, 2, 1, 2, 1),
        "activation": "gelu",
    },
    "teacher": {
        "epochs": 1,
        "batch_size": 80,
        "widths": (24, 8, 8),
        "resample": 0.2,
        "weight": 0.8,
    },
}
"""A tiny teacher, and a stem that begins with its first layers."""

EVERYTHING: Mapping[str, Any] = {
    **TAUGHT,
    "teacher.frozen_stem": 0.5,
    "label_smoothing": 0.1,
    "optimiser.layer_decay": 0.8,
    "optimiser.clip_norm": 1.0,
    "optimiser.restart": 0.5,
    "augmentation.resample": 0.2,
    "augmentation.trivial_augment": 0.5,
    "mixing.mixup": 0.8,
    "mixing.cutmix": 1.0,
    "mixing.probability": 0.8,
    "patch_dropout.rate": 0.25,
    "patch_dropout.until": 0.7,
}
"""A recipe with every part that draws random numbers or keeps state."""


class Interrupted(Exception):
    """The end of a run with epochs left."""


def make_trainer(
    recipe: Recipe,
    data: TrainingData,
    folder: Path,
    initial: Mapping[str, torch.Tensor] | None = None,
) -> Trainer:
    assert recipe.architecture is not None
    config = recipe.architecture.config(IMAGE_SIZE, CLASSES)
    return Trainer(recipe, config, data, folder, CPU, initial)


def trained(recipe: Recipe, data: TrainingData, folder: Path) -> Trainer:
    trainer = make_trainer(recipe, data, folder)
    trainer.run()
    return trainer


def interrupted_after(recipe: Recipe, data: TrainingData, folder: Path, epochs: int) -> None:
    def stop(metrics: EpochMetrics) -> None:
        if metrics["epoch"] == epochs:
            raise Interrupted

    with pytest.raises(Interrupted):
        make_trainer(recipe, data, folder).run(stop)


def same(one: Trainer, other: Trainer) -> bool:
    """Check that weights, best weights and measurements are equal bit for bit."""
    assert one.best is not None
    assert other.best is not None
    return (
        same_tensors(one.weights, other.weights)
        and one.best.epoch == other.best.epoch
        and same_tensors(one.best.weights, other.best.weights)
        and [(row["train_loss"], row["validation_loss"]) for row in one.history]
        == [(row["train_loss"], row["validation_loss"]) for row in other.history]
    )


def same_tensors(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )
