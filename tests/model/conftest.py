"""A CIFAR-10 folder, a checkpoint and a recipe so small that a whole run takes a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from model.data.datasets import open_dataset
from model.data.pictures import Images, decode
from model.training.recipe import Recipe
from tests.model.data.configs import bicubic_config
from tests.model.training.synthetic import write_cifar, write_start


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """400 training and 100 test pictures in the binary layout."""
    return write_cifar(tmp_path / "cifar")


@pytest.fixture
def pictures(cifar: Path, recipe: Recipe) -> Images:
    """The training pictures, split as the recipe says."""
    return decode(open_dataset(cifar, recipe.validation, recipe.seed).train, bicubic_config(32, 32))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrix libraries may share work among threads differently from call to call, and so round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return tiny_recipe(tmp_path / "start")


def tiny_recipe(start: Path) -> Recipe:
    return Recipe(
        name="tiny",
        checkpoint=str(write_start(start, image_size=(32, 32))),
        seed=3,
        epochs=4,
        batch_size=40,
        validation=80,
        label_smoothing=0.0,
        precision="float32",
        learning_rate=3e-3,
        layer_decay=1.0,
        clip_norm=100.0,
    )
