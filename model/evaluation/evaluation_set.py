"""Labelled pictures to measure a model on, as the files that a user would send."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.data import cifar10
from model.data.image_folder import find_pictures
from model.errors import DatasetError
from model.evaluation.robustness import UPLOADS, Upload, as_png


@dataclass(frozen=True)
class EvaluationSet:
    """Labelled pictures as files.

    Attributes:
        source: as the user wrote it, for messages.
        split: `test`, `validation`, or empty where the data are not split.
        names: names of the classes, in index order.
        labels: int64 [N], indices of `names`.
        upload, name: take a picture's number; return its file's bytes, thread-safe, and what a message calls it.
        variants: the same pictures as users send them (see `robustness`), by name; empty where not offered.
    """

    source: str
    split: str
    names: tuple[str, ...]
    labels: NDArray[np.int64]
    upload: Callable[[int], bytes]
    name: Callable[[int], str]
    variants: Mapping[str, Callable[[int], bytes]]

    def __len__(self) -> int:
        return len(self.labels)

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
        return np.array([list(labels).index(name) for name in self.names], dtype=np.int64)[self.labels]


def is_cifar10(root: Path) -> bool:
    """Return whether a folder has CIFAR-10's binary files."""
    return (root / cifar10.LABELS_FILE).is_file() or (root / cifar10.TEST_FILES[0]).is_file()


def open_evaluation_set(root: Path) -> EvaluationSet:
    """Open CIFAR-10's test set, or the test set (else the validation set, else all) of a folder of classes.

    Raises:
        DatasetError: neither, or not readable.
    """
    if is_cifar10(root):
        return _cifar10(root)
    folder = find_pictures(root)
    split, files = "", folder.train
    for name, given in (("validation", folder.validation), ("test", folder.test)):
        if given is not None:
            split, files = name, given

    def read(number: int) -> bytes:
        path = files.paths[number]
        try:
            return path.read_bytes()
        except OSError as error:
            raise DatasetError(f"{path}: cannot be read: {error.strerror}") from error

    return EvaluationSet(
        str(root), split, folder.labels, files.labels, read, lambda number: str(files.paths[number]), {}
    )


def _cifar10(root: Path) -> EvaluationSet:
    names, images = cifar10.read_labels(root), cifar10.read_test(root)

    def made_by(make: Upload) -> Callable[[int], bytes]:
        return lambda number: make(images.pixels[number].transpose(1, 2, 0), number)

    variants = {name: made_by(make) for name, make in UPLOADS.items()}
    return EvaluationSet(str(root), "test", names, images.labels, made_by(as_png), "test image {}".format, variants)
