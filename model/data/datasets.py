"""The two kinds of data that can be trained on, behind one face."""

from __future__ import annotations

import csv
import io
import logging
from collections import Counter
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from model.config import PreprocessConfig, Size
from model.data import cifar10
from model.data.decoding import MEMORY, Decoder
from model.data.image_folder import PictureFiles, find_pictures
from model.data.labelled_images import Images
from model.data.split import stratify
from model.errors import DatasetError

logger = logging.getLogger(__name__)

SPLIT_FILE: Final = "split.csv"


class Dataset(Protocol):
    """Labelled pictures for training, for choices, and perhaps for the last measurement.

    Attributes:
        name: what a model card calls it.
        labels: names of the classes, in index order.
        image_size: (rows, columns) of all pictures; None where they differ.
        train_count, validation_count: how many there are.
        has_test: whether there are test pictures.
    """

    name: str
    labels: tuple[str, ...]
    image_size: Size | None
    train_count: int
    validation_count: int
    has_test: bool

    def load(
        self,
        train: PreprocessConfig,
        validation: PreprocessConfig,
        folder: Path,
        *,
        memory: int = MEMORY,
        progress: bool = True,
    ) -> tuple[Images, Images]:
        """Pictures to train on and pictures held out, each in a size of its own.

        Args:
            train, validation: preprocessing of either.
            folder: where pictures go that are too many for the memory.
            memory: bytes that either may take of it.
            progress: show bars.

        Raises:
            DatasetError: bad pictures, test pictures among them, or no room on the disk.
        """
        ...

    def load_test(self, config: PreprocessConfig, folder: Path, *, progress: bool = True) -> Images:
        """The test pictures. Not for training, nor for any choice made while training.

        Raises:
            DatasetError: they cannot be read.
        """
        ...

    def split(self) -> str | None:
        """Which picture is on which side, as CSV; None where the recipe's seed says it all."""
        ...


def open_dataset(root: Path, validation: int | float, seed: int) -> Dataset:
    """Recognise a folder's kind: CIFAR-10's binary files, or pictures in folders.

    Args:
        root: the folder.
        validation: how many training pictures to set aside, or which share, where the folder does not say.
        seed: decides which.

    Raises:
        DatasetError: neither, or data that cannot be trained on.
    """
    if is_cifar10(root):
        return Cifar10(root, validation, seed)
    if (root / "batches.meta").is_file():
        raise DatasetError(f"{root}: the Python version of CIFAR-10; train on its binary version (data_batch_1.bin)")
    return Folder(root, validation, seed)


def is_cifar10(root: Path) -> bool:
    """Whether a folder holds a file of CIFAR-10's binary version."""
    return any((root / name).is_file() for name in (*cifar10.TRAIN_FILES, *cifar10.TEST_FILES, cifar10.LABELS_FILE))


class Cifar10:
    """CIFAR-10's binary files; see `Dataset`."""

    name = "CIFAR-10"
    image_size: Size | None = cifar10.IMAGE_SIZE
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
        self,
        train: PreprocessConfig,
        validation: PreprocessConfig,
        folder: Path,
        *,
        memory: int = MEMORY,
        progress: bool = True,
    ) -> tuple[Images, Images]:
        """See `Dataset`; the test pictures are not read, only counted."""
        return (
            cifar10.resize(self._train, train, folder, memory=memory, progress=progress),
            cifar10.resize(self._validation, validation, folder, memory=memory, progress=progress),
        )

    def load_test(self, config: PreprocessConfig, folder: Path, *, progress: bool = True) -> Images:
        """See `Dataset`."""
        return cifar10.resize(cifar10.read_test(self.root), config, folder, progress=progress)

    def split(self) -> None:
        """Nothing: the seed says it."""


class Folder:
    """Pictures in one folder a class; see `Dataset` and `image_folder`."""

    image_size: Size | None = None

    def __init__(self, root: Path, validation: int | float, seed: int) -> None:
        self.root = root
        self.name = root.resolve().name
        found = find_pictures(root)
        self.labels = found.labels
        self._train = found.train
        self._test = found.test
        if found.validation is not None:
            self._validation = found.validation
        else:
            kept, aside = stratify(found.train.labels, found.labels, validation, seed)
            self._train, self._validation = found.train.take(kept), found.train.take(aside)
        self.train_count, self.validation_count = len(self._train), len(self._validation)
        self.has_test = self._test is not None

    def load(
        self,
        train: PreprocessConfig,
        validation: PreprocessConfig,
        folder: Path,
        *,
        memory: int = MEMORY,
        progress: bool = True,
    ) -> tuple[Images, Images]:
        """See `Dataset`; the test pictures are decoded, too, to tell now which of them are bad, and forgotten."""
        decoder = Decoder(progress=progress)
        kept = decoder.decode(self._train, train, folder, memory=memory)
        aside = decoder.decode(self._validation, validation, folder, memory=memory)
        if self._test is not None:
            decoder.check(self._test, validation)
        decoder.refuse_bad(self.root)
        self._tell_copies(decoder.digests)
        return kept, aside

    def load_test(self, config: PreprocessConfig, folder: Path, *, progress: bool = True) -> Images:
        """See `Dataset`."""
        if self._test is None:
            raise DatasetError(f"{self.root}: has no test pictures")
        decoder = Decoder(progress=progress)
        images = decoder.decode(self._test, config, folder)
        decoder.refuse_bad(self.root)
        return images

    def split(self) -> str:
        """See `Dataset`."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["split", "class", "file"])
        for name, files in self._parts():
            for path, label in zip(files.paths, files.labels, strict=True):
                writer.writerow([name, self.labels[label], path.relative_to(self.root).as_posix()])
        return text.getvalue()

    def _parts(self) -> list[tuple[str, PictureFiles]]:
        parts = [("train", self._train), ("validation", self._validation)]
        return parts if self._test is None else [*parts, ("test", self._test)]

    def _tell_copies(self, digests: dict[Path, bytes]) -> None:
        """Pictures that are on two sides make a model look better than it is; in two classes, worse."""
        parts = self._parts()
        seen_in_training = {digests[path] for path in self._train.paths}
        for name, files in parts[1:]:
            copies = sum(digests[path] in seen_in_training for path in files.paths)
            if copies:
                logger.warning("%s: %d %s pictures are copies of training pictures", self.root, copies, name)
        classes = {(digests[path], label) for _, files in parts for path, label in _labelled(files)}
        ambiguous = sum(count > 1 for count in Counter(digest for digest, _ in classes).values())
        if ambiguous:
            logger.warning("%s: %d pictures are in more than one class", self.root, ambiguous)


def _labelled(files: PictureFiles) -> zip[tuple[Path, np.int64]]:
    return zip(files.paths, files.labels, strict=True)
