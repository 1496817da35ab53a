"""Labelled pictures, as unopened files and as decoded arrays.

Decoding uses the same code as uploads.
"""

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.config import PreprocessConfig
from model.errors import DatasetError, ImageError
from model.images.preprocess import preprocess

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Largest array of decoded pictures in memory, in bytes; larger arrays go to a file.
MEMORY: Final = 4 << 30

# Most bad files that a message names.
_LISTED_FILES: Final = 20


@dataclass(frozen=True)
class PictureFiles:
    """Labelled pictures as files.

    Attributes:
        labels: int64 [N].
        read: maps a picture's number, 0...N-1, to its file's bytes, or raises OSError. Thread-safe.
        name: maps a picture's number to its name in messages.
    """

    labels: NDArray[np.int64]
    read: Callable[[int], bytes]
    name: Callable[[int], str]

    @classmethod
    def of(cls, paths: list[Path], labels: NDArray[np.int64]) -> Self:
        """Return the pictures at `paths`."""

        def read(number: int) -> bytes:
            return paths[number].read_bytes()

        return cls(labels, read, lambda number: str(paths[number]))

    def __len__(self) -> int:
        return len(self.labels)

    def decode(self, number: int, config: PreprocessConfig) -> NDArray[np.uint8]:
        """Decode a picture with the preprocessing of a model: uint8 [H, W, C].

        Raises:
            DatasetError: the file cannot be read or decoded.
        """
        try:
            return preprocess(self.read(number), config)
        except ImageError as error:
            reason = str(error)
        except OSError as error:
            reason = str(error.strerror)
        raise DatasetError(f"{self.name(number)}: {reason}")

    def take(self, indices: NDArray[np.int64]) -> "PictureFiles":
        """Return the pictures at `indices`, in that order."""
        return PictureFiles(
            self.labels[indices],
            lambda number: self.read(int(indices[number])),
            lambda number: self.name(int(indices[number])),
        )


@dataclass(frozen=True)
class Images:
    """Labelled images.

    Attributes:
        pixels: uint8 [N, C, H, W], RGB; may be mapped from a file.
        labels: int64 [N].
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


def allocate(shape: tuple[int, ...], folder: Path) -> NDArray[np.uint8]:
    """Return an uninitialised array; an array larger than `MEMORY` is in a nameless file.

    Args:
        shape: of the array of bytes.
        folder: folder of the file.

    Raises:
        DatasetError: the disk is too full.
    """
    size = math.prod(shape)
    if size <= MEMORY:
        return np.empty(shape, np.uint8)
    if size > shutil.disk_usage(folder).free:
        raise DatasetError(
            f"{folder}: no room for {size / 2**30:.1f} GiB of decoded pictures; free disk space"
        )
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, np.uint8, "w+", shape=shape)


def decode(
    files: PictureFiles, config: PreprocessConfig, folder: Path, *, leave_out: bool = False
) -> Images:
    """Decode pictures on all cores with the preprocessing of a model.

    Args:
        folder: for pixels that do not fit in memory; see `allocate`.
        leave_out: skip files that do not decode, with a warning.

    Raises:
        DatasetError: files do not decode, with the names and errors of the first; or the disk is
            too full.
    """
    pixels = allocate((len(files), len(config.mean), *config.size), folder)

    def work(number: int) -> str | None:
        try:
            pixels[number] = files.decode(number, config).transpose(2, 0, 1)
        except DatasetError as error:
            return f"  {error}"
        return None

    problems = on_all_cores(work, len(files), "read")
    if not any(problems):
        return Images(pixels, files.labels)
    message = _message(sorted(filter(None, problems)))
    if not leave_out:
        raise DatasetError(message)
    logger.warning("left out: %s", message)
    good = [number for number, problem in enumerate(problems) if problem is None]
    return Images(pixels[good], files.labels[good])


def on_all_cores(work: Callable[[int], T], count: int, what: str) -> list[T]:
    """Return the result of some work for each number of a picture below `count`, in order.

    An interruption cancels the work that is not begun.

    Args:
        what: verb for the work, in the progress bar.
    """
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        results = pool.map(work, range(count))
        return list(tqdm(results, total=count, desc=what, unit="img", disable=None))
    finally:
        pool.shutdown(cancel_futures=True)


def _message(problems: list[str]) -> str:
    """Return a message that names the first files with their problems."""
    plural = "s" if len(problems) > 1 else ""
    lines = [
        f"{len(problems)} file{plural} in class folders cannot be read as pictures: repair, or "
        "move out of the class folders:"
    ]
    lines += problems[:_LISTED_FILES]
    if len(problems) > _LISTED_FILES:
        lines.append(f"  and {len(problems) - _LISTED_FILES} more")
    return "\n".join(lines)


def channel_statistics(pixels: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel, for values from 0 to 1.

    Args:
        pixels: uint8 [N, C, H, W].

    Returns:
        Means and deviations, rounded to four decimals.
    """
    # A histogram of the 256 values is exact and needs no float copy of every pixel.
    counts = [
        sum(np.bincount(image[channel].ravel(), minlength=256) for image in pixels)
        for channel in range(3)
    ]
    values = np.arange(256) / 255
    shares = np.array(counts) / (pixels[0, 0].size * len(pixels))
    means = shares @ values
    deviations = np.sqrt(shares @ values**2 - means**2)
    return tuple(means.round(4).tolist()), tuple(deviations.round(4).tolist())
