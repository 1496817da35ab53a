"""Data to train on and to measure on, of both kinds: CIFAR-10's binary files and folders of pictures; their splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.data import cifar10
from model.data.image_folder import find_pictures
from model.data.pictures import PictureFiles
from model.errors import DatasetError


@dataclass(frozen=True)
class Dataset:
    """A training set, a validation set and perhaps a test set.

    Attributes:
        name: what a model card calls them.
        labels: names of the classes, in index order.
        train, validation: no picture is in both; every class is in each.
        test: not for training, nor for any choice made while training; None where there is none.
        own_validation: whether the validation set was given, and not split off.
    """

    name: str
    labels: tuple[str, ...]
    train: PictureFiles
    validation: PictureFiles
    test: PictureFiles | None
    own_validation: bool = False


def open_dataset(root: Path, validation: int | float, seed: int) -> Dataset:
    """Recognise a folder's kind, and split its training pictures where it has no validation set of its own.

    Args:
        validation: size of the validation set, as a number or as a share of the training pictures.
        seed: decides which pictures are in it.

    Raises:
        DatasetError: neither kind, or data that cannot be trained on.
    """
    if cifar10.is_cifar10(root):
        labels = cifar10.read_labels(root)
        test, train = (cifar10.read_files(root, names) for names in (cifar10.TEST_FILES, cifar10.TRAIN_FILES))
        parts = stratify(train, labels, validation, seed)
        return Dataset("CIFAR-10", labels, *parts, test)
    folder, name = find_pictures(root), root.resolve().name
    if folder.validation is not None:
        return Dataset(name, folder.labels, folder.train, folder.validation, folder.test, own_validation=True)
    return Dataset(name, folder.labels, *stratify(folder.train, folder.labels, validation, seed), folder.test)


def stratify(
    files: PictureFiles, names: Sequence[str], validation: int | float, seed: int
) -> tuple[PictureFiles, PictureFiles]:
    """Split pictures into (training, validation) with about the same share of each class; each class is on both sides.

    Args:
        names: of the classes.
        validation: number of pictures, or share of them.
        seed: decides which pictures.

    Raises:
        DatasetError: a class with less than two pictures, or a number that leaves no picture on one side.
    """
    counts = np.bincount(files.labels, minlength=len(names))
    if counts.min() < 2:
        name, pictures = names[int(counts.argmin())], "1 picture" if counts.min() else "no pictures"
        raise DatasetError(f"class {name!r} has {pictures}: it needs one to train on and one to validate on")
    share = validation / len(files) if isinstance(validation, int) else validation
    if not 0 < share < 1:
        raise DatasetError(f"cannot set {validation} of {len(files)} pictures aside for validation")
    generator = np.random.default_rng(seed)
    chosen = np.zeros(len(files), bool)
    for label, count in enumerate(np.clip(np.round(share * counts).astype(int), 1, counts - 1)):
        chosen[generator.permutation(np.flatnonzero(files.labels == label))[:count]] = True
    return files.take(np.flatnonzero(~chosen)), files.take(np.flatnonzero(chosen))


@dataclass(frozen=True)
class EvaluationSet:
    """Labelled pictures to measure a model on.

    Attributes:
        source: as the user wrote it, for messages.
        split: `test`, `validation`, or empty where the data are not split.
        names: names of the classes, in index order.
        files: the pictures; their labels are indices of `names`.
    """

    source: str
    split: str
    names: tuple[str, ...]
    files: PictureFiles

    def truth(self, labels: Sequence[str], model: str) -> NDArray[np.int64]:
        """Return the right class of each picture as an index of the model's labels: int64 [N].

        Args:
            labels: the model's, in index order; it may know more classes than there are here.
            model: its name, for messages.

        Raises:
            DatasetError: a class that the model does not know, or knows twice.
        """
        unknown = [name for name in self.names if list(labels).count(name) != 1]
        if unknown:
            raise DatasetError(
                f"{self.source}: classes that are not those of the model {model}, by name: "
                f"{', '.join(unknown[:5])}{', …' if len(unknown) > 5 else ''}"
            )
        return np.array([list(labels).index(name) for name in self.names], dtype=np.int64)[self.files.labels]


def open_evaluation_set(root: Path) -> EvaluationSet:
    """Open CIFAR-10's test set, or the test set (else the validation set, else all) of a folder of classes.

    Raises:
        DatasetError: neither, or not readable.
    """
    if cifar10.is_cifar10(root):
        files = cifar10.read_files(root, cifar10.TEST_FILES)
        return EvaluationSet(str(root), "test", cifar10.read_labels(root), files)
    folder = find_pictures(root)
    split = "test" if folder.test is not None else "validation" if folder.validation is not None else ""
    return EvaluationSet(str(root), split, folder.labels, folder.test or folder.validation or folder.train)
