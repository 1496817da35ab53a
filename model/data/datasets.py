"""Data to train on and to measure on, of both kinds: CIFAR-10's binary files and folders of pictures; their splits.

A folder of pictures has a folder for each class. Either all in one place, to be split, or split already:

    root/cat/1.jpg          root/train/cat/1.jpg
    root/dog/2.png          root/val/cat/7.jpg         `val` or `validation`; without it `train` is split
                            root/test/cat/9.jpg        optional: measured once, when all choices are made

Classes are the sorted names of the folders. Pictures may lie deeper. Hidden files and folders, `Thumbs.db` and
`desktop.ini` are ignored, and so are files beside the class folders; every other file in a class is a picture.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model.config import Size
from model.data import cifar10
from model.data.pictures import PictureFiles
from model.errors import DatasetError

_TRAIN: Final = "train"
_VALIDATION: Final = ("val", "validation")
_TEST: Final = "test"
_IGNORED: Final = frozenset({"thumbs.db", "desktop.ini"})


@dataclass(frozen=True)
class Dataset:
    """A training set, a validation set and perhaps a test set.

    Attributes:
        name: what a model card calls them.
        labels: names of the classes, in index order.
        train, validation: no picture is in both; every class is in each.
        test: not for training, nor for any choice made while training; None where there is none.
        own_validation: whether the validation set was given, and not split off.
        image_size: (rows, columns) of all pictures; None where they differ.
    """

    name: str
    labels: tuple[str, ...]
    train: PictureFiles
    validation: PictureFiles
    test: PictureFiles | None
    own_validation: bool = False
    image_size: Size | None = None

    def split(self) -> dict[str, list[str]]:
        """Return the names of the pictures of each set."""
        sets = {"train": self.train, "validation": self.validation}
        sets |= {} if self.test is None else {"test": self.test}
        return {name: [files.name(number) for number in range(len(files))] for name, files in sets.items()}


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
        return Dataset("CIFAR-10", labels, *parts, test, image_size=cifar10.IMAGE_SIZE)
    labels, sets = find_pictures(root)
    own = sets.get("validation")
    parts = stratify(sets[_TRAIN], labels, validation, seed) if own is None else (sets[_TRAIN], own)
    return Dataset(root.resolve().name, labels, *parts, sets.get(_TEST), own_validation=own is not None)


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
    labels, sets = find_pictures(root)
    split = next((name for name in (_TEST, "validation") if name in sets), "")
    return EvaluationSet(str(root), split, labels, sets[split or _TRAIN])


def find_pictures(root: Path) -> tuple[tuple[str, ...], dict[str, PictureFiles]]:
    """Return the names of the classes of a folder, and its pictures by their set; no file is opened.

    Of `train`, `validation` and `test` the first is always there: all pictures where the folder is not split.

    Raises:
        DatasetError: no such folder, nothing in it, one class, an empty class, classes that differ by case only,
            or a split whose classes are not those of `train`.
    """
    folders = {folder.name: folder for folder in _folders(root)}
    if _TRAIN not in folders or not _folders(folders[_TRAIN]):
        labels, train = _read_classes(root)
        return labels, {_TRAIN: train}
    for name, folder in folders.items():
        if name not in (_TRAIN, *_VALIDATION, _TEST):
            raise DatasetError(f"{folder}: beside {_TRAIN}/ only {', '.join((*_VALIDATION, _TEST))} are expected")
    labels, train = _read_classes(folders[_TRAIN])
    sets = {_TRAIN: train}
    for name in sorted(folders.keys() - {_TRAIN}):
        found, pictures = _read_classes(folders[name])
        if found != labels:
            odd = min(set(found) ^ set(labels))
            raise DatasetError(f"{folders[name]}: its classes are not those of {_TRAIN}/: {odd!r} is in one alone")
        if sets.setdefault(name if name == _TEST else "validation", pictures) is not pictures:
            raise DatasetError(f"{root}: has both {' and '.join(_VALIDATION)}; keep one")
    return labels, sets


def _read_classes(root: Path) -> tuple[tuple[str, ...], PictureFiles]:
    folders = _folders(root)
    if not folders:
        raise DatasetError(f"{root}: no pictures: expected one folder of them for each class")
    if len(folders) == 1:
        raise DatasetError(f"{root}: one class ({folders[0].name!r}): two are needed to tell apart")
    seen: dict[str, str] = {}
    paths: list[list[Path]] = []
    for folder in folders:
        if not folder.name.isprintable():  # it becomes a label, in answers, tables and pictures
            raise DatasetError(f"{root}: the name {folder.name!a} has characters that cannot be printed")
        other = seen.setdefault(unicodedata.normalize("NFC", folder.name).casefold(), folder.name)
        if other != folder.name:
            raise DatasetError(f"{root}: the classes {other!r} and {folder.name!r} differ by case alone")
        paths.append(_files(folder))
        if not paths[-1]:
            raise DatasetError(f"{folder}: the class has no pictures")
    labels = np.repeat(np.arange(len(folders), dtype=np.int64), [len(files) for files in paths])
    return tuple(folder.name for folder in folders), PictureFiles.of(
        [file for files in paths for file in files], labels
    )


def _folders(root: Path) -> list[Path]:
    """List the visible folders in `root`, links to folders included, sorted by name."""
    try:
        return sorted((entry for entry in root.iterdir() if not _hidden(entry.name) and entry.is_dir()), key=str)
    except OSError as error:
        raise DatasetError(f"{root}: cannot be read: {error.strerror}") from error


def _files(folder: Path) -> list[Path]:
    """List every file of a class, at any depth, sorted; a link to a folder or to nothing is a file that is bad."""
    paths = (path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return sorted(path for path in paths if not any(map(_hidden, path.relative_to(folder).parts)))


def _hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in _IGNORED
