"""Folders of pictures: their classes and their splits. No file is opened.

A folder of pictures has one folder per class. The classes may be split, above or below:

    root/cat/1.jpg  root/train/cat/1.jpg  root/seg_train/seg_train/cat/1.jpg  root/cat/train/1.jpg
    root/dog/2.png  root/val/cat/7.jpg    root/seg_test/seg_test/cat/7.jpg    root/cat/test/7.jpg
                    root/test/cat/9.jpg

Splits are recognised by their structure: folders without pictures of their own that hold the same
folders. Their names tell them apart. A folder with unclear splits is refused.

Classes are the sorted names of the class folders; pictures may be at any depth below. Junk is
skipped (see `is_junk`). Every other file in a class is a picture. Files outside the class folders
are ignored, and `PictureFolder.notes` names them.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from model.errors import DatasetError
from model.extensions.datasets.folder_checks import (
    check_classes,
    check_links,
    check_roles,
    check_same_classes,
    refuse_flat_splits,
)
from model.extensions.datasets.pictures import PictureFiles
from model.extensions.datasets.remarks import Remarks
from model.extensions.datasets.split_names import TEST, TRAIN, VALIDATION
from model.extensions.datasets.splits import Split, find_splits, wraps_itself
from model.images.listing import is_junk, list_folder, listed


@dataclass(frozen=True)
class PictureFolder:
    """The pictures of a folder, by class and split.

    Attributes:
        root: the folder as its user wrote it.
        labels: names of the classes, in index order.
        sets: the pictures of each split: `train`, `validation` or `test`. Without splits, all
            pictures are `train`.
        folders: folder of each split, below `root`; empty without splits.
        notes: lines on ignored files and on interpretations that may surprise.
    """

    root: Path
    labels: tuple[str, ...]
    sets: dict[str, PictureFiles]
    folders: dict[str, str]
    notes: tuple[str, ...]

    def choose(
        self, wanted: Sequence[str], purpose: str, pick: str = "--data"
    ) -> tuple[str, tuple[str, ...]]:
        """Return the first wanted set that exists, and the notes to show.

        A folder without splits has only one set.

        Raises:
            DatasetError: there are only other splits.
        """
        if not self.folders:
            return TRAIN, self.notes
        chosen = next((name for name in wanted if name in self.sets), None)
        if chosen is None:
            splits = listed(f"{folder}/" for folder in self.folders.values())
            example = self.root / next(iter(self.folders.values()))
            raise DatasetError(
                f"{self.root}: {splits}: no {' or '.join(wanted)} split to {purpose}; "
                f"to use another split, name it: {pick} {example}"
            )
        others = [f"{folder}/" for name, folder in self.folders.items() if name != chosen]
        unused = f"; {listed(others)} not used" if others else ""
        note = f"{self.root}: {self.folders[chosen]}/ is used to {purpose}{unused}"
        return chosen, (note, *self.notes)


def find_pictures(root: Path, *, least_classes: int = 2, pick: str = "--data") -> PictureFolder:
    """Return the classes of a folder, and its pictures by split.

    Args:
        root: holds class folders, or splits that do.
        least_classes: number of classes that are required.
        pick: option that names the folder to read, for messages.

    Raises:
        DatasetError: the folder is missing or empty, has too few classes or an empty class, or its
            splits are unclear or have different classes. Or classes differ only by case, or links
            put pictures into two classes.
    """
    if root.is_file():
        raise DatasetError(
            f"{root}: a file, not a folder: unpack an archive, and give the folder that holds "
            "one folder of pictures for each class"
        )
    remarks = Remarks(root)
    listing = list_folder(root)
    if wraps_itself(listing):
        remarks.ignored += listing.files
        listing = list_folder(listing.folders[0])
    splits = find_splits(listing, remarks, pick)
    if splits is None:
        remarks.ignored += listing.files
        refuse_flat_splits(listing)
        plain = Split.of_folders(".", TRAIN, listing.folders)
        check_classes(plain, remarks, least_classes, pick)
        check_links(root, [plain])
        pictures = _list_pictures(plain, remarks)
        return PictureFolder(root, plain.labels, {TRAIN: pictures}, {}, remarks.lines())
    check_roles(root, splits, pick)
    for split in splits:
        check_classes(split, remarks, least_classes, pick)
    check_same_classes(root, splits)
    check_links(root, splits)
    by_role = {str(split.role): split for split in splits}
    roles: list[str] = [role for role in (TRAIN, VALIDATION, TEST) if role in by_role]
    sets = {role: _list_pictures(by_role[role], remarks) for role in roles}
    folders = {role: by_role[role].name for role in roles}
    return PictureFolder(root, by_role[roles[0]].labels, sets, folders, remarks.lines())


def _list_pictures(split: Split, remarks: Remarks) -> PictureFiles:
    """List the pictures of a split, labelled by the indices of its classes.

    Raises:
        DatasetError: a class is empty, or a folder cannot be read.
    """
    paths: list[Path] = []
    counts: list[int] = []
    for folder in split.folders:
        files = _list_class(folder, remarks)
        if not files:
            raise DatasetError(
                f"{folder}: the class has no pictures; add some, or remove the folder"
            )
        paths += files
        counts.append(len(files))
    return PictureFiles.of(paths, np.repeat(np.arange(len(counts), dtype=np.int64), counts))


def _list_class(folder: Path, remarks: Remarks) -> list[Path]:
    """List every file of a class, at any depth, sorted.

    A link to a folder and a broken link count as files, which do not decode.
    """
    files: list[Path] = []
    for name, folders, file_names in os.walk(folder, onerror=_cannot_be_read):
        parent = Path(name)
        folders[:] = [folder_name for folder_name in folders if not is_junk(folder_name)]
        names = [*folders, *(file_name for file_name in file_names if not is_junk(file_name))]
        for path in (parent / entry for entry in names):
            if path.is_file() or path.is_symlink():
                files.append(path)
                if parent != folder:
                    remarks.nested.add(parent)
            elif not path.is_dir():
                remarks.irregular.append(path)
    return sorted(files)


def _cannot_be_read(error: OSError) -> NoReturn:
    raise DatasetError(f"{error.filename}: cannot be read: {error.strerror}") from error
