"""Folders of pictures, a folder for each class; the listing of their files opens none.

Either all in one place, to be split, or split already:

    root/cat/1.jpg          root/train/cat/1.jpg
    root/dog/2.png          root/val/cat/7.jpg         `val` or `validation`; without it `train` is split
                            root/test/cat/9.jpg        optional: measured once, when all choices are made

Classes are the sorted names of the folders. Pictures may lie deeper. Hidden files and folders, `Thumbs.db` and
`desktop.ini` are ignored, and so are files beside the class folders; every other file in a class is a picture.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from model.data.pictures import PictureFiles
from model.errors import DatasetError

_TRAIN: Final = "train"
_VALIDATION: Final = ("val", "validation")
_TEST: Final = "test"
_IGNORED: Final = frozenset({"thumbs.db", "desktop.ini"})


@dataclass(frozen=True)
class ImageFolder:
    """The labelled files of a folder.

    Attributes:
        labels: names of the classes, in index order.
        train: all pictures where no validation split is given.
        validation: None where it is to be split off.
        test: None where there is none.
    """

    labels: tuple[str, ...]
    train: PictureFiles
    validation: PictureFiles | None = None
    test: PictureFiles | None = None


def find_pictures(root: Path) -> ImageFolder:
    """List the pictures of a folder.

    Raises:
        DatasetError: no such folder, nothing in it, one class, an empty class, classes that differ by case only,
            or a split whose classes are not those of `train`.
    """
    folders = {folder.name: folder for folder in _folders(root)}
    if _TRAIN not in folders or not _folders(folders[_TRAIN]):
        return ImageFolder(*_read_classes(root))
    for name, folder in folders.items():
        if name not in (_TRAIN, *_VALIDATION, _TEST):
            raise DatasetError(f"{folder}: beside {_TRAIN}/ only {', '.join((*_VALIDATION, _TEST))} are expected")
    labels, train = _read_classes(folders[_TRAIN])
    splits: dict[str, PictureFiles] = {}
    for name in sorted(folders.keys() - {_TRAIN}):
        found, pictures = _read_classes(folders[name])
        if found != labels:
            odd = min(set(found) ^ set(labels))
            raise DatasetError(f"{folders[name]}: its classes are not those of {_TRAIN}/: {odd!r} is in one alone")
        if splits.setdefault(name if name == _TEST else _VALIDATION[0], pictures) is not pictures:
            raise DatasetError(f"{root}: has both {' and '.join(_VALIDATION)}; keep one")
    return ImageFolder(labels, train, splits.get(_VALIDATION[0]), splits.get(_TEST))


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
