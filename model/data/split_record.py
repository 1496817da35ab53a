"""The record of a run's pictures, `split.json`: which were trained on, by their bytes.

    {"train": {NAME: DIGEST}, "validation": {…}, "test": {…}, "before": {…}}

`before` are pictures that the checkpoint was trained on from which the run started. A picture is
known again under any name and in any folder, as long as its file is the same; a copy that was
encoded anew is another picture.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.data.folders import TEST, TRAIN, VALIDATION
from model.data.pictures import PictureFiles
from model.errors import DatasetError

SPLIT_FILE: Final = "split.json"
_BEFORE: Final = "before"
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True)
class SplitRecord:
    """The pictures of a run, by set: names with digests of their files; an unreadable file has an
    empty one.
    """

    sets: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, sets: Mapping[str, PictureFiles], start: Self | None = None) -> Self:
        """Read the files of each set.

        Args:
            sets: files by `train`, `validation` or `test`.
            start: record of the checkpoint that the run starts from.
        """
        found = {name: _named_digests(files) for name, files in sets.items()}
        if start is not None:
            found[_BEFORE] = {**start.sets.get(_BEFORE, {}), **start.sets.get(TRAIN, {})}
        return cls(found)

    @classmethod
    def read(cls, checkpoint: str | None) -> Self | None:
        """Read the record in the folder of a checkpoint; None if there is none, or one of a version
        without digests.

        Raises:
            DatasetError: it is damaged.
        """
        if checkpoint is None or checkpoint == "bundled":
            return None
        path = Path(checkpoint).expanduser() / SPLIT_FILE
        try:
            return cls.parse(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise DatasetError(
                f"{path}: cannot be read: {error}; remove it to go on without"
            ) from error

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse the text of a record; None if it is of a version without digests.

        Raises:
            ValueError: it is not a record.
        """
        sets = json.loads(text)
        if not isinstance(sets, dict):
            raise ValueError("not a record of a split")
        if any(isinstance(files, list) for files in sets.values()):
            return None
        if not all(isinstance(files, dict) for files in sets.values()):
            raise ValueError("not a record of a split")
        return cls(sets)

    def text(self) -> str:
        """Return the record as the text of its file."""
        return json.dumps(self.sets, indent=0)

    def has_same_split(self, text: str) -> bool:
        """Return whether the text of another record has the same pictures in each set; an older one
        has names alone.
        """
        try:
            other = json.loads(text)
            with_digests = self.parse(text) is not None
        except ValueError:
            return False
        for name in (TRAIN, VALIDATION, TEST):
            mine = self.sets.get(name, {})
            others = other.get(name, {})
            if others != (mine if with_digests else list(mine)) and (mine or others):
                return False
        return True

    @property
    def holds_out(self) -> bool:
        """Whether the run left validation pictures that it did not fit."""
        return bool(self.sets.get(VALIDATION))

    def trained_on(self, digests: Iterable[str]) -> NDArray[np.bool_]:
        """Return for each digest whether its picture was trained on, by the run or before it: bool
        [N].
        """
        return self._members(digests, (TRAIN, _BEFORE))

    def held_out(self, digests: Iterable[str]) -> NDArray[np.bool_]:
        """Return for each digest whether its picture validated or tested the run, and was not
        trained on: bool [N].
        """
        every = list(digests)
        return self._members(every, (VALIDATION, TEST)) & ~self.trained_on(every)

    def trained_before(self, name: str) -> int:
        """Return how many pictures of a set the run's start was trained on."""
        return int(self._members(self.sets.get(name, {}).values(), (_BEFORE,)).sum())

    def _members(self, digests: Iterable[str], names: Iterable[str]) -> NDArray[np.bool_]:
        known = {digest for name in names for digest in self.sets.get(name, {}).values()} - {""}
        return np.array([digest in known for digest in digests], np.bool_)


def digests_of(files: PictureFiles) -> list[str]:
    """Return the digest of each file's bytes, on all cores; of an unreadable file an empty text."""

    def digest(number: int) -> str:
        try:
            return hashlib.blake2b(files.read(number), digest_size=_DIGEST_BYTES).hexdigest()
        except OSError:  # named where it is decoded
            return ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(digest, range(len(files)))
        return list(tqdm(found, total=len(files), desc="compare", unit="img", disable=None))


def copy_record(checkpoint: str, out: Path) -> None:
    """Copy the record of a checkpoint's folder, if it has one, beside a copy of its weights; raises
    `OSError`.
    """
    path = Path(checkpoint).expanduser() / SPLIT_FILE
    if checkpoint != "bundled" and path.is_file():
        shutil.copyfile(path, out / SPLIT_FILE)


def _named_digests(files: PictureFiles) -> dict[str, str]:
    names = [files.name(number) for number in range(len(files))]
    return dict(zip(names, digests_of(files), strict=True))
