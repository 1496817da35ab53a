"""Labelled pictures: as files that are not yet open, and decoded into arrays by the code that decodes uploads."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.config import PreprocessConfig
from model.errors import DatasetError, ImageError
from model.images.preprocess import preprocess

logger = logging.getLogger(__name__)

# Number of bad files that a message names; the rest is counted.
_LISTED_FILES: Final = 20


@dataclass(frozen=True)
class PictureFiles:
    """Labelled pictures as files.

    Attributes:
        labels: int64 [N].
        read: takes a picture's number, 0...N-1; returns its file's bytes, or raises OSError. Thread-safe.
        name: takes a picture's number; returns what a message calls it.
    """

    labels: NDArray[np.int64]
    read: Callable[[int], bytes]
    name: Callable[[int], str]

    @classmethod
    def of(cls, paths: list[Path], labels: NDArray[np.int64]) -> PictureFiles:
        """Return the pictures at `paths`."""

        def read(number: int) -> bytes:
            return paths[number].read_bytes()

        return cls(labels, read, lambda number: str(paths[number]))

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: NDArray[np.int64]) -> PictureFiles:
        """Return the pictures at `indices`, in that order."""
        return PictureFiles(
            self.labels[indices],
            lambda number: self.read(int(indices[number])),
            lambda number: self.name(int(indices[number])),
        )


@dataclass(frozen=True)
class Images:
    """Labelled images: uint8 [N, C, H, W], RGB; and labels, int64 [N]."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


def decode(files: PictureFiles, config: PreprocessConfig, *, leave_out: bool = False) -> Images:
    """Decode pictures, on all cores, as a model with this preprocessing sees them.

    Args:
        leave_out: warn of files that are no pictures, and leave them out.

    Raises:
        DatasetError: files that are no pictures, the first of which it names with what is wrong.
    """
    pixels = np.empty((len(files), len(config.mean), *config.size), np.uint8)

    def work(number: int) -> str | None:
        try:
            pixels[number] = preprocess(files.read(number), config).transpose(2, 0, 1)
        except ImageError as error:
            return f"  {files.name(number)}: {error}"
        except OSError as error:
            return f"  {files.name(number)}: {error.strerror}"
        return None

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        work_done = pool.map(work, range(len(files)))
        problems = list(tqdm(work_done, total=len(files), desc="read", unit="img", disable=None))
    finally:
        pool.shutdown(cancel_futures=True)  # an interruption does not wait for a million files
    bad = sorted(problem for problem in problems if problem is not None)
    if not bad:
        return Images(pixels, files.labels)
    more = [f"  and {len(bad) - _LISTED_FILES} more"] if len(bad) > _LISTED_FILES else []
    heading = f"{len(bad)} file{'s' * (len(bad) > 1)} in class folders cannot be read as pictures:"
    message = "\n".join([heading, *bad[:_LISTED_FILES], *more])
    if not leave_out:
        raise DatasetError(message)
    logger.warning("left out: %s", message)
    good = [number for number, problem in enumerate(problems) if problem is None]
    return Images(pixels[good], files.labels[good])
