"""The kinds of data that can be trained on, CIFAR-10 and folders of pictures, with the same methods; their splits."""

from __future__ import annotations

import csv
import io
import logging
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.config import PreprocessConfig, Size
from model.data import cifar10
from model.data.image_folder import Decoder, PictureFiles, find_pictures
from model.data.labelled_images import Images, PixelStorage
from model.errors import DatasetError

logger = logging.getLogger(__name__)


def open_dataset(root: Path, validation: int | float, seed: int, *, skip_bad: bool = False) -> Dataset:
    """Recognise a folder's kind: CIFAR-10's binary files, or pictures in folders.

    Args:
        validation: size of the validation set, as a number or as a share of the training pictures; not used
            where the folder has a validation set of its own.
        seed: decides which pictures are in it.
        skip_bad: whether files that are no pictures are logged and left out, instead of refused.

    Raises:
        DatasetError: neither, or data that cannot be trained on.
    """
    if is_cifar10(root):
        return Cifar10Dataset(root, validation, seed)
    if (root / "batches.meta").is_file():
        raise DatasetError(f"{root}: the Python version of CIFAR-10; train on its binary version (data_batch_1.bin)")
    return FolderDataset(root, validation, seed, skip_bad=skip_bad)


def is_cifar10(root: Path) -> bool:
    """Return whether a folder holds a file of CIFAR-10's binary version."""
    return any((root / name).is_file() for name in (*cifar10.TRAIN_FILES, *cifar10.TEST_FILES, cifar10.LABELS_FILE))


class Cifar10Dataset:
    """CIFAR-10's binary files, with the attributes and methods of `FolderDataset`."""

    name = "CIFAR-10"
    image_size: Size | None = cifar10.IMAGE_SIZE
    has_validation = False
    has_test = True

    def __init__(self, root: Path, validation: int | float, seed: int) -> None:
        self.root = root
        self.labels = cifar10.read_labels(root)
        cifar10.check_test_file(root)
        images = cifar10.read_train(root)
        count = validation if isinstance(validation, int) else round(validation * len(images))
        self._train, self._validation = cifar10.split_validation(images, count, seed)
        self.train_count, self.validation_count = len(self._train), len(self._validation)

    def load(
        self, train: PreprocessConfig, validation: PreprocessConfig, storage: PixelStorage, *, progress: bool = True
    ) -> tuple[Images, Images]:
        """See `FolderDataset.load`; of the test set only the file's size is checked, when the dataset is opened."""
        return (
            cifar10.resize(self._train, train, storage, progress=progress),
            cifar10.resize(self._validation, validation, storage, progress=progress),
        )

    def load_test(self, config: PreprocessConfig, storage: PixelStorage, *, progress: bool = True) -> Images:
        """See `FolderDataset.load_test`."""
        return cifar10.resize(cifar10.read_test(self.root), config, storage, progress=progress)

    def split_csv(self) -> str | None:
        """Return None: the seed alone decides which picture is in which set."""
        return None


class FolderDataset:
    """A training set, a validation set and perhaps a test set of pictures, a folder for each class; see `image_folder`.

    Attributes:
        name: what a model card calls them.
        labels: names of the classes, in index order.
        image_size: (rows, columns) of all pictures; None where they differ.
        train_count, validation_count: sizes of the two sets, bad files included.
        has_validation: whether the validation set was given, and not split off.
        has_test: whether there is a test set.
    """

    image_size: Size | None = None

    def __init__(self, root: Path, validation: int | float, seed: int, *, skip_bad: bool = False) -> None:
        self.root = root
        self.skip_bad = skip_bad
        self.name = root.resolve().name
        folder = find_pictures(root)
        self.labels, self._test = folder.labels, folder.test
        if folder.validation is not None:
            self._train, self._validation = folder.train, folder.validation
        else:
            split = stratify(folder.train.labels, folder.labels, validation, seed)
            self._train, self._validation = map(folder.train.take, split)
        self.train_count, self.validation_count = len(self._train), len(self._validation)
        self.has_validation = folder.validation is not None
        self.has_test = self._test is not None

    def load(
        self, train: PreprocessConfig, validation: PreprocessConfig, storage: PixelStorage, *, progress: bool = True
    ) -> tuple[Images, Images]:
        """Return the training set and the validation set, each in the size that its preprocessing gives.

        The test set is decoded, too, so that bad pictures in it are named before training.

        Raises:
            DatasetError: bad pictures, or no room on the disk.
        """
        decoder = Decoder(progress=progress)
        images = decoder.decode(self._train, train, storage), decoder.decode(self._validation, validation, storage)
        if self._test is not None:
            decoder.check(self._test, validation)
        if self.skip_bad:
            decoder.warn_of_bad(self.root)
        else:
            decoder.refuse_bad(self.root)
        self._warn_of_copies(decoder.digests)
        return images

    def load_test(self, config: PreprocessConfig, storage: PixelStorage, *, progress: bool = True) -> Images:
        """Return the test set: not for training, nor for any choice made while training.

        Raises:
            DatasetError: there is none, or it cannot be read.
        """
        if self._test is None:
            raise DatasetError(f"{self.root}: has no test pictures")
        decoder = Decoder(progress=progress)
        images = decoder.decode(self._test, config, storage)
        if not self.skip_bad:  # else `load` has warned of them
            decoder.refuse_bad(self.root)
        return images

    def split_csv(self) -> str:
        """Return which picture is in which set, as CSV."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["split", "class", "file"])
        for name, files in self._sets():
            for path, label in zip(files.paths, files.labels, strict=True):
                writer.writerow([name, self.labels[label], path.relative_to(self.root).as_posix()])
        return text.getvalue()

    def _sets(self) -> list[tuple[str, PictureFiles]]:
        sets = [("train", self._train), ("validation", self._validation)]
        return sets if self._test is None else [*sets, ("test", self._test)]

    def _warn_of_copies(self, digests: dict[Path, bytes]) -> None:
        """Warn of pictures in two sets, which raise the measured accuracy, and in two classes, which lower it."""
        sets = {
            name: [
                (digests[path], label) for path, label in zip(part.paths, part.labels, strict=True) if path in digests
            ]
            for name, part in self._sets()
        }
        seen_in_training = {digest for digest, _ in sets["train"]}
        for name, pictures in sets.items():
            copies = sum(digest in seen_in_training for digest, _ in pictures)
            if copies and name != "train":
                logger.warning("%s: %d %s pictures are copies of training pictures", self.root, copies, name)
        classes = {picture for pictures in sets.values() for picture in pictures}
        ambiguous = sum(count > 1 for count in Counter(digest for digest, _ in classes).values())
        if ambiguous:
            logger.warning("%s: %d pictures are in more than one class", self.root, ambiguous)


Dataset = Cifar10Dataset | FolderDataset


def stratify(
    labels: NDArray[np.int64], names: tuple[str, ...], validation: int | float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split pictures into (training, validation) with the same share of each class; each class is on both sides.

    Args:
        labels: int64 [N].
        names: of the classes, each of which has a picture.
        validation: number of pictures, or share of them (rounded; at least one a class).
        seed: decides which pictures.

    Returns:
        Two ascending arrays of indices into `labels`.

    Raises:
        DatasetError: a class with one picture, or a number that leaves a class without a picture on one side.
    """
    counts = count_by_class(labels, names)
    total, classes = len(labels), len(names)
    size = validation
    if isinstance(size, float):
        size = min(max(round(size * total), classes), total - classes)
    if not classes <= size <= total - classes:
        raise DatasetError(
            f"validation {validation} of {total} pictures: {classes} classes need {classes} to {total - classes}"
        )
    generator = np.random.default_rng(seed)
    chosen = np.zeros(total, bool)
    for label, count in enumerate(_apportion(counts, size)):
        members = np.flatnonzero(labels == label)
        chosen[generator.permutation(members)[:count]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def count_by_class(labels: NDArray[np.int64], names: tuple[str, ...]) -> NDArray[np.int64]:
    """Return how many pictures each class has, int64 [K]; raise DatasetError where a class has less than two."""
    counts: NDArray[np.int64] = np.bincount(labels, minlength=len(names))
    for name, count in zip(names, counts, strict=True):
        if count < 2:
            pictures = "no pictures" if not count else "1 picture"
            raise DatasetError(f"class {name!r} has {pictures}: it needs one to train on and one to validate on")
    return counts


def _apportion(counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return how many pictures of each class to take: in proportion, at least one, never all, `size` in total."""
    quota = size * counts / counts.sum()
    given: NDArray[np.int64] = np.clip(quota.astype(np.int64), 1, counts - 1)
    while given.sum() < size:
        given[np.argmax(np.where(given < counts - 1, quota - given, -np.inf))] += 1
    while given.sum() > size:
        given[np.argmax(np.where(given > 1, given - quota, -np.inf))] -= 1
    return given
