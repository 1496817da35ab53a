"""Folders of pictures, a folder for each class: the listing of their files, which opens none, and their decoding.

Either all in one place, to be split, or split already:

    root/cat/1.jpg          root/train/cat/1.jpg
    root/dog/2.png          root/val/cat/7.jpg         `val` or `validation`; without it `train` is split
                            root/test/cat/9.jpg        optional: measured once, when all choices are made

Classes are the sorted names of the folders. Pictures may lie deeper. Hidden files and folders, `Thumbs.db` and
`desktop.ini` are ignored, and so are files beside the class folders; every other file in a class is a picture.
"""

from __future__ import annotations

import hashlib
import logging
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.config import PreprocessConfig
from model.data.labelled_images import Images, PixelStorage
from model.errors import DatasetError, ImageError
from model.images.preprocess import preprocess

logger = logging.getLogger(__name__)

_TRAIN: Final = "train"
_VALIDATION: Final = ("val", "validation")
_TEST: Final = "test"
_SPLITS: Final = (_TRAIN, *_VALIDATION, _TEST)
_IGNORED: Final = frozenset({"thumbs.db", "desktop.ini"})
_LISTED_FILES: Final = 20
"""Number of bad files that a message names; the rest is counted."""


@dataclass(frozen=True)
class PictureFiles:
    """Labelled files, not yet opened: paths sorted by class and then by name, and labels, int64 [N]."""

    paths: tuple[Path, ...]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, indices: NDArray[np.int64]) -> PictureFiles:
        """Return the files at `indices`, in that order."""
        return PictureFiles(tuple(self.paths[i] for i in indices), self.labels[indices])


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
    validation: PictureFiles | None
    test: PictureFiles | None


def find_pictures(root: Path) -> ImageFolder:
    """List the pictures of a folder.

    Raises:
        DatasetError: no such folder, nothing in it, one class, an empty class, classes that differ by case only,
            or a split whose classes are not those of `train`.
    """
    folders = _folders(root)
    by_name = {folder.name: folder for folder in folders}
    if _TRAIN not in by_name or not _folders(by_name[_TRAIN]):
        labels, pictures = _read_classes(root, folders)
        return ImageFolder(labels, pictures, None, None)
    for folder in folders:
        if folder.name not in _SPLITS:
            raise DatasetError(f"{folder}: beside {_TRAIN}/ only {', '.join(_SPLITS[1:])} are expected")
    validation = [by_name[name] for name in _VALIDATION if name in by_name]
    if len(validation) > 1:
        raise DatasetError(f"{root}: has both {' and '.join(_VALIDATION)}; keep one")
    labels, pictures = _read_classes(by_name[_TRAIN], _folders(by_name[_TRAIN]))
    return ImageFolder(
        labels,
        pictures,
        _read_split(validation[0], labels) if validation else None,
        _read_split(by_name[_TEST], labels) if _TEST in by_name else None,
    )


def _read_split(root: Path, expected: tuple[str, ...]) -> PictureFiles:
    folders = _folders(root)
    names = {folder.name for folder in folders}
    for name in expected:
        if name not in names:
            raise DatasetError(f"{root}: has no pictures of the class {name!r}")
    for folder in folders:
        if folder.name not in expected:
            raise DatasetError(f"{folder}: {_TRAIN}/ has no class {folder.name!r}")
    return _read_classes(root, folders)[1]


def _read_classes(root: Path, folders: list[Path]) -> tuple[tuple[str, ...], PictureFiles]:
    if not folders:
        raise DatasetError(f"{root}: no pictures: expected one folder of them for each class")
    if len(folders) == 1:
        raise DatasetError(f"{root}: one class ({folders[0].name!r}): two are needed to tell apart")
    seen: dict[str, Path] = {}
    paths: list[Path] = []
    counts: list[int] = []
    for folder in folders:
        try:
            folder.name.encode()
        except UnicodeEncodeError:
            raise DatasetError(f"{root}: the name {folder.name!a} is not UTF-8") from None
        if not folder.name.isprintable():  # it becomes a label, in answers, tables and pictures
            raise DatasetError(f"{root}: the name {folder.name!a} has characters that cannot be printed")
        other = seen.setdefault(unicodedata.normalize("NFC", folder.name).casefold(), folder)
        if other is not folder:
            raise DatasetError(f"{root}: the classes {other.name!r} and {folder.name!r} differ by case alone")
        files = sorted(_files(folder))
        if not files:
            raise DatasetError(f"{folder}: the class has no pictures")
        paths += files
        counts.append(len(files))
    labels = np.repeat(np.arange(len(folders), dtype=np.int64), counts)
    return tuple(folder.name for folder in folders), PictureFiles(tuple(paths), labels)


def _folders(root: Path) -> list[Path]:
    """List the visible folders in `root`, links to folders included, sorted by name."""
    try:
        return sorted((entry for entry in root.iterdir() if not _hidden(entry.name) and entry.is_dir()), key=str)
    except OSError as error:
        raise DatasetError(f"{root}: cannot be read: {error.strerror}") from error


def _files(folder: Path) -> Iterator[Path]:
    """Yield every file of a class, at any depth; a link to a folder is an error and is not followed."""

    def fail(error: OSError) -> None:
        raise DatasetError(f"{error.filename}: cannot be read: {error.strerror}") from error

    for place, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not _hidden(name)]
        linked = [name for name in folders if Path(place, name).is_symlink()]
        if linked:
            raise DatasetError(f"{Path(place, linked[0])}: a link to a folder inside a class is not followed")
        yield from (Path(place, name) for name in files if not _hidden(name))


def _hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in _IGNORED


class Decoder:
    """Decodes files, once and in parallel, by the code that decodes uploads, and collects their errors.

    Attributes:
        bad: (path, reason) of every file that is no picture.
        digests: of the bytes of each file that was decoded.
    """

    def __init__(self, *, progress: bool = True) -> None:
        self.progress = progress
        self.bad: list[tuple[Path, str]] = []
        self.digests: dict[Path, bytes] = {}

    def decode(self, files: PictureFiles, config: PreprocessConfig, storage: PixelStorage) -> Images:
        """Decode files as a model with this preprocessing sees them; bad files are left out.

        Raises:
            DatasetError: no room on the disk.
        """
        pixels = storage.allocate((len(files), len(config.mean), *config.size))

        def keep(index: int, picture: NDArray[np.uint8]) -> None:
            pixels[index] = picture.transpose(2, 0, 1)

        self._run(files.paths, config, keep, "read")
        good = np.flatnonzero([path in self.digests for path in files.paths])
        for place, index in enumerate(good.tolist()):
            if place != index:  # in place: the pictures may take most of the memory
                pixels[place] = pixels[index]
        return Images(pixels[: len(good)], files.labels[good])

    def check(self, files: PictureFiles, config: PreprocessConfig) -> None:
        """Decode files, and keep nothing but their errors."""
        self._run(files.paths, config, lambda index, picture: None, "check")

    def refuse_bad(self, root: Path) -> None:
        """Raise DatasetError if there was any bad file so far; it names them and what is wrong with each."""
        if self.bad:
            raise DatasetError("\n".join(self._bad_files(root)))

    def warn_of_bad(self, root: Path) -> None:
        """Log what `refuse_bad` raises, if there was any bad file so far: the run goes on without them."""
        for line in self._bad_files(root) if self.bad else ():
            logger.warning("%s", line)

    def _bad_files(self, root: Path) -> list[str]:
        self.bad.sort()
        named = [f"  {path}: {reason}" for path, reason in self.bad[:_LISTED_FILES]]
        more = [f"  and {len(self.bad) - _LISTED_FILES} more"] if len(self.bad) > _LISTED_FILES else []
        count = f"{len(self.bad)} file{'s' * (len(self.bad) > 1)}"
        return [f"{root}: {count} in class folders cannot be read as pictures:", *named, *more]

    def _run(
        self, paths: Iterable[Path], config: PreprocessConfig, keep: Callable[[int, NDArray[np.uint8]], None], name: str
    ) -> None:
        def work(index: int, path: Path) -> None:
            try:
                if not S_ISREG(path.stat().st_mode):  # a pipe or a device would block, or never end
                    raise OSError(0, "not a regular file")
                data = path.read_bytes()
                keep(index, preprocess(data, config))
            except (ImageError, OSError) as error:
                self.bad.append((path, (error.strerror if isinstance(error, OSError) else None) or str(error)))
            else:
                self.digests[path] = hashlib.blake2b(data, digest_size=16).digest()

        pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
        try:
            futures = [pool.submit(work, index, path) for index, path in enumerate(paths)]
            off = None if self.progress else True
            for future in tqdm(as_completed(futures), total=len(futures), desc=name, unit="img", disable=off):
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)  # an interruption does not wait for a million files
