"""Data to train and measure on: CIFAR-10's binary files, and folders of pictures."""

import logging
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.errors import DatasetError
from model.extensions.datasets.folders import PictureFolder, find_pictures
from model.extensions.datasets.pictures import PictureFiles
from model.extensions.datasets.split_names import TEST, TRAIN, VALIDATION
from model.extensions.evaluation import cifar10
from model.images.listing import listed
from model.layer_config import Size

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dataset:
    """A training set, a validation set and perhaps a test set.

    Attributes:
        name: name for a model card.
        labels: names of the classes, in index order.
        train, validation: disjoint sets of pictures; each has every class.
        test: not used for training, nor for any choice during training; may be None.
        own_validation: whether the data have a validation set; else it was split off.
        image_size: (rows, columns) of all pictures; None if sizes differ.
    """

    name: str
    labels: tuple[str, ...]
    train: PictureFiles
    validation: PictureFiles
    test: PictureFiles | None
    own_validation: bool = False
    image_size: Size | None = None

    def sets(self) -> dict[str, PictureFiles]:
        """Return the pictures of each set."""
        sets = {TRAIN: self.train, VALIDATION: self.validation}
        return sets if self.test is None else {**sets, TEST: self.test}


def open_dataset(root: Path, validation: int | float, seed: int) -> Dataset:
    """Open a folder of pictures or of CIFAR-10, and log the use of its splits.

    Without a validation set, a part of the training pictures becomes one.

    Args:
        root: the folder.
        validation: size of the validation set, a number or a share of the training pictures.
        seed: seed of the draw of its pictures.

    Raises:
        DatasetError: the folder is of neither kind, or its data cannot be trained on.
    """
    if cifar10.is_cifar10(root):
        labels = cifar10.read_labels(root)
        cifar_test = cifar10.read_files(root, cifar10.TEST_FILES)
        every = cifar10.read_files(root, cifar10.TRAIN_FILES)
        kept, aside = stratify(every, labels, validation, seed)
        return Dataset("CIFAR-10", labels, kept, aside, cifar_test, image_size=cifar10.IMAGE_SIZE)
    folder = find_pictures(root)
    chosen, notes = folder.choose([TRAIN], "train")
    if folder.folders:
        notes = (_uses(folder), *folder.notes)
    for note in notes:
        logger.info("%s", note)
    train = folder.sets[chosen]
    held_out = folder.sets.get(VALIDATION)
    has_validation = held_out is not None
    if held_out is None:
        train, held_out = stratify(train, folder.labels, validation, seed)
    test = folder.sets.get(TEST)
    name = root.resolve().name
    return Dataset(name, folder.labels, train, held_out, test, own_validation=has_validation)


def _uses(folder: PictureFolder) -> str:
    """Return one line that names the use of each split in training."""
    names = folder.folders
    validated = (
        f"{names[VALIDATION]}/ validates" if VALIDATION in names else "a part of it validates"
    )
    measured = f", {names[TEST]}/ is measured at the end" if TEST in names else ""
    return f"{folder.root}: {names[TRAIN]}/ is trained on, {validated}{measured}"


def stratify(
    files: PictureFiles, names: Sequence[str], validation: int | float, seed: int
) -> tuple[PictureFiles, PictureFiles]:
    """Split pictures into training and validation pictures, with the same share of each class.

    Both sides have every class.

    Args:
        files: the pictures.
        names: names of the classes.
        validation: number or share of the validation pictures.
        seed: seed of the draw.

    Raises:
        DatasetError: a class has less than two pictures, or a side would be empty.
    """
    counts = np.bincount(files.labels, minlength=len(names))
    if counts.min() < 2:
        name = names[int(counts.argmin())]
        pictures = "1 picture" if counts.min() else "no pictures"
        raise DatasetError(
            f"class {name!r} has {pictures}: it needs one to train on and one to validate on: "
            "add pictures, or remove its folder"
        )
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
        source: the path as the user wrote it, for messages.
        split: `test` or `validation`; empty without splits.
        names: names of the classes, in index order.
        files: the pictures, labelled by indices of `names`.
        notes: lines about the split in use, and about skipped files.
    """

    source: str
    split: str
    names: tuple[str, ...]
    files: PictureFiles
    notes: tuple[str, ...] = ()

    def truth(self, labels: Sequence[str], model: str) -> NDArray[np.int64]:
        """Return the right class of each picture as an index of the model's labels: int64 [N].

        Args:
            labels: labels of the model, in index order; they may include further classes.
            model: name of the model, for messages.

        Raises:
            DatasetError: the model lacks a class, or has it twice.
        """
        known = [unicodedata.normalize("NFC", label) for label in labels]
        unknown = [name for name in self.names if known.count(name) != 1]
        if unknown:
            raise DatasetError(
                f"{self.source}: classes that are not those of the model {model}, by name: "
                f"{listed(unknown)}: rename the folders to its labels ({listed(known)}), or name "
                "the labels like the folders with --labels FILE (VIT_LABELS)"
            )
        indices = np.array([known.index(name) for name in self.names], dtype=np.int64)
        return indices[self.files.labels]


def open_evaluation_set(
    root: Path, wanted: Sequence[str] = (TEST, VALIDATION), purpose: str = "measure"
) -> EvaluationSet:
    """Open CIFAR-10's test set, one split of a folder, or all of a folder without splits.

    Args:
        root: the folder.
        wanted: splits in order of preference.
        purpose: verb for the use of the pictures, for messages.

    Raises:
        DatasetError: the folder is of neither kind, not readable, or without these splits.
    """
    if cifar10.is_cifar10(root):
        files = cifar10.read_files(root, cifar10.TEST_FILES)
        return EvaluationSet(str(root), TEST, cifar10.read_labels(root), files)
    folder = find_pictures(root)
    chosen, notes = folder.choose(wanted, purpose)
    split = chosen if folder.folders else ""
    return EvaluationSet(str(root), split, folder.labels, folder.sets[chosen], notes)
