"""The record of a run's pictures, `split.json`: the training pictures and others, by their bytes.

    {"train": {NAME: DIGEST}, "validation": {…}, "test": {…}, "before": {…}}

`before` are the training pictures of the checkpoint that the run started from. A picture is
recognised under any name and in any folder if its file is the same. A copy that was encoded again
is another picture.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from model.errors import DatasetError
from model.extensions.datasets.pictures import PictureFiles, on_all_cores
from model.extensions.datasets.split_names import TEST, TRAIN, VALIDATION

logger = logging.getLogger(__name__)

SPLIT_FILE: Final = "split.json"
_BEFORE: Final = "before"
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True)
class SplitRecord:
    """The pictures of a run by set: names with digests of their files.

    The digest of an unreadable file is empty.
    """

    sets: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, sets: Mapping[str, PictureFiles], start: Self | None = None) -> Self:
        """Read the files of each set.

        Args:
            sets: files by `train`, `validation` or `test`.
            start: record of the checkpoint that the run starts from.
        """
        digests = {
            name: dict(zip(map(files.name, range(len(files))), digests_of(files), strict=True))
            for name, files in sets.items()
        }
        if start is not None:
            digests[_BEFORE] = {**start.sets.get(_BEFORE, {}), **start.sets.get(TRAIN, {})}
        return cls(digests)

    def with_validation_in_training(self) -> "SplitRecord":
        """Return the record of a network that is trained on the validation pictures, too."""
        sets = dict(self.sets)
        sets[TRAIN] = {**sets[TRAIN], **sets.pop(VALIDATION)}
        return SplitRecord(sets)

    @classmethod
    def read(cls, checkpoint: str | None) -> Self | None:
        """Read the record in the folder of a checkpoint.

        Return None if the folder lacks a record or has only an older record without digests.

        Raises:
            DatasetError: the record is damaged.
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
                f"{path}: cannot be read: {error}; remove it to continue without it"
            ) from error

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse the text of a record; return None for an older version without digests.

        Raises:
            ValueError: the text is not a record.
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
        """Return the text of the record's file."""
        return json.dumps(self.sets, indent=0)

    def has_same_split(self, text: str) -> bool:
        """Return whether the text of another record has the same pictures in each set.

        An older record has only names to compare.
        """
        try:
            other = json.loads(text)
            with_digests = self.parse(text) is not None
        except ValueError:
            return False
        for name in (TRAIN, VALIDATION, TEST):
            mine = self.sets.get(name, {})
            others = other.get(name, {})
            if not mine and not others:
                continue
            if others != (mine if with_digests else list(mine)):
                return False
        return True

    @property
    def holds_out(self) -> bool:
        """Return whether the run has validation pictures, which it did not train on."""
        return bool(self.sets.get(VALIDATION))

    def trained_on(self, digests: Iterable[str]) -> NDArray[np.bool_]:
        """Return whether the run or its start was trained on each digest's picture: bool [N]."""
        return self._members(digests, (TRAIN, _BEFORE))

    def count_leaks(self, name: str) -> int:
        """Return how many pictures of a set the run or its start was trained on."""
        return int(self.trained_on(self.sets.get(name, {}).values()).sum())

    def held_out(self, digests: Iterable[str]) -> NDArray[np.bool_]:
        """Return whether the run validated or tested on each digest's picture: bool [N].

        Pictures that were also trained on do not count.
        """
        every = list(digests)
        return self._members(every, (VALIDATION, TEST)) & ~self.trained_on(every)

    def contradictions(self, sets: Mapping[str, PictureFiles], labels: Sequence[str]) -> str:
        """Return a warning of pictures with two labels, in one set or in two; empty without any.

        Args:
            sets: the files that this record was made of.
            labels: names of the classes, in index order.
        """
        first: dict[str, tuple[str, int]] = {}
        twice: list[str] = []
        for set_name, files in sets.items():
            for number, label in enumerate(files.labels.tolist()):
                name = files.name(number)
                digest = self.sets[set_name][name]
                other, other_label = first.setdefault(digest, (name, label))
                if digest and other_label != label:
                    twice.append(f"{name} is {labels[label]!r}, {other} is {labels[other_label]!r}")
        if not twice:
            return ""
        return (
            f"{len(twice)} pictures have two labels, such as: {twice[0]}: remove the wrong copies"
        )

    def log_contradictions(self, sets: Mapping[str, PictureFiles], labels: Sequence[str]) -> None:
        """Log the warning of `contradictions`."""
        warning = self.contradictions(sets, labels)
        if warning:
            logger.warning("%s", warning)

    def log_leaks(self, start: str | None, measured: Sequence[str] = (VALIDATION, TEST)) -> None:
        """Warn if pictures that the run measures on are training pictures, of it or of its start.

        Args:
            start: name of the checkpoint that the run starts from.
            measured: names of the sets that the run measures on.
        """
        sources = {
            TRAIN: "are training pictures, too: remove them from one of the sets",
            _BEFORE: f"were trained on by {start}",
        }
        for name in measured:
            pictures = self.sets.get(name, {})
            for other, source in sources.items():
                leaks = self._members(pictures.values(), (other,))
                if leaks.any():
                    logger.warning(
                        "%d of %d %s pictures, such as %s, %s: new pictures are answered worse "
                        "than these",
                        leaks.sum(),
                        len(pictures),
                        name,
                        list(pictures)[int(leaks.argmax())],
                        source,
                    )

    def _members(self, digests: Iterable[str], names: Iterable[str]) -> NDArray[np.bool_]:
        known = {digest for name in names for digest in self.sets.get(name, {}).values()} - {""}
        return np.array([digest in known for digest in digests], np.bool_)


def digests_of(files: PictureFiles) -> list[str]:
    """Return the digest of each file's bytes, on all cores; empty for an unreadable file."""

    def digest(number: int) -> str:
        try:
            return hashlib.blake2b(files.read(number), digest_size=_DIGEST_BYTES).hexdigest()
        except OSError:  # decoding the file reports the error
            return ""

    return on_all_cores(digest, len(files), "compare")


def copy_record(checkpoint: str, out: Path) -> None:
    """Copy the record of a checkpoint's folder, if there is one, into the folder `out`.

    Raises:
        OSError: the record cannot be copied.
    """
    path = Path(checkpoint).expanduser() / SPLIT_FILE
    if checkpoint != "bundled" and path.is_file():
        shutil.copyfile(path, out / SPLIT_FILE)
