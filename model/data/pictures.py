"""Labelled pictures: as files that are not yet open, and decoded into arrays by the code that
decodes uploads.
"""

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.config import PreprocessConfig
from model.errors import DatasetError, ImageError
from model.images.preprocess import preprocess

logger = logging.getLogger(__name__)

# Bytes up to which an array of decoded pictures is kept in memory.
MEMORY: Final = 4 << 30

# Number of bad files that a message names; the rest is counted.
_LISTED_FILES: Final = 20


@dataclass(frozen=True)
class PictureFiles:
    """Labelled pictures as files.

    Attributes:
        labels: int64 [N].
        read: takes a picture's number, 0...N-1; returns its file's bytes, or raises OSError.
        Thread-safe.
        name: takes a picture's number; returns what a message calls it.
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

    @classmethod
    def joined(cls, one: "PictureFiles", other: "PictureFiles") -> Self:
        """Return the pictures of two sets with the same classes, in order."""
        count = len(one)

        def read(number: int) -> bytes:
            return one.read(number) if number < count else other.read(number - count)

        def name(number: int) -> str:
            return one.name(number) if number < count else other.name(number - count)

        return cls(np.concatenate([one.labels, other.labels]), read, name)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: NDArray[np.int64]) -> "PictureFiles":
        """Return the pictures at `indices`, in that order."""
        return PictureFiles(
            self.labels[indices],
            lambda number: self.read(int(indices[number])),
            lambda number: self.name(int(indices[number])),
        )


@dataclass(frozen=True)
class Images:
    """Labelled images: uint8 [N, C, H, W], RGB, perhaps mapped from a file; and labels, int64 [N]."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


def allocate(shape: tuple[int, ...], folder: Path) -> NDArray[np.uint8]:
    """Return an uninitialised array, above `MEMORY` in a file without a name in `folder`.

    Raises:
        DatasetError: no room on the disk.
    """
    size = math.prod(shape)
    if size <= MEMORY:
        return np.empty(shape, np.uint8)
    if size > shutil.disk_usage(folder).free:
        raise DatasetError(f"{folder}: no room for {size / 2**30:.1f} GiB of decoded pictures")
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, np.uint8, "w+", shape=shape)


def decode(
    files: PictureFiles, config: PreprocessConfig, folder: Path, *, leave_out: bool = False
) -> Images:
    """Decode pictures, on all cores, as a model with this preprocessing sees them.

    Args:
        folder: where their pixels go if they take too much memory; see `allocate`.
        leave_out: warn of files that are no pictures, and leave them out.

    Raises:
        DatasetError: files that are no pictures, the first of which it names with what is wrong; or
        no room.
    """
    pixels = allocate((len(files), len(config.mean), *config.size), folder)

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
        futures = [pool.submit(work, number) for number in range(len(files))]
        for _ in tqdm(
            as_completed(futures), total=len(files), desc="read", unit="img", disable=None
        ):
            pass
    finally:
        pool.shutdown(cancel_futures=True)  # an interruption does not wait for a million files
    problems = [future.result() for future in futures]
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


def channel_statistics(pixels: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of uint8 [N, C, H, W], scaled to 0...1, to
    four decimals.
    """
    # From the histogram of the 256 values: exact, and without a float copy of every pixel.
    counts = [
        sum(np.bincount(image[channel].ravel(), minlength=256) for image in pixels)
        for channel in range(3)
    ]
    values = np.arange(256) / 255
    means = [float(np.average(values, weights=row)) for row in counts]
    deviations = [
        float(np.average((values - mean) ** 2, weights=row)) ** 0.5
        for row, mean in zip(counts, means, strict=True)
    ]
    return tuple(round(mean, 4) for mean in means), tuple(
        round(deviation, 4) for deviation in deviations
    )
