"""A CIFAR-10 folder and a recipe so small that a whole run takes a second."""

from dataclasses import replace
from pathlib import Path

import pytest

from model.extensions.datasets.pictures import Images, decode
from model.extensions.evaluation.datasets import open_dataset
from model.extensions.training.recipe import Recipe
from model.extensions.training.training_data import TrainingData
from tests.extensions.training.synthetic import write_cifar
from tests.model.conftest import _one_thread
from tests.model.images.pictures import config
from tests.service.cli.conftest import checkpoint, pictures, quick_start
from tests.service.conftest import service

__all__ = ["_one_thread", "checkpoint", "pictures", "quick_start", "service"]


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """400 training and 100 test pictures in the binary layout."""
    return write_cifar(tmp_path / "cifar")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    """Return the training pictures, split by the recipe."""
    cifar = write_cifar(tmp_path_factory.mktemp("data") / "cifar")
    recipe = tiny_recipe()
    dataset = open_dataset(cifar, recipe.validation, recipe.seed)
    train, validation = (
        decode(part, config((32, 32)), cifar) for part in (dataset.train, dataset.validation)
    )
    return TrainingData(train, validation, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


@pytest.fixture
def few(data: TrainingData) -> TrainingData:
    """Return 80 training and 40 validation pictures, for runs that need not learn."""
    train, validation = (
        Images(part.pixels[:count], part.labels[:count])
        for part, count in ((data.train, 80), (data.validation, 40))
    )
    return replace(data, train=train, validation=validation)


@pytest.fixture
def recipe() -> Recipe:
    return tiny_recipe()


def tiny_recipe() -> Recipe:
    return Recipe.model_validate(
        {
            "name": "tiny",
            "seed": 3,
            "epochs": 4,
            "batch_size": 40,
            "validation": 80,
            "label_smoothing": 0.0,
            "precision": "float32",
            "architecture": {"patch_size": 8, "width": 32, "depth": 2, "heads": 2, "mlp_width": 64},
            "optimiser": {"learning_rate": 3e-3, "muon_learning_rate": 5e-3},
        }
    )
