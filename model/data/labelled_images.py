"""Labelled images as arrays, in memory or, where they are too many, in a file that vanishes with the process."""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model.errors import DatasetError

MEMORY: Final = 4 << 30
"""Bytes of decoded images up to which they are kept in memory."""


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

    def take(self, indices: NDArray[np.int64]) -> Images:
        """Return the images at `indices`, in that order."""
        return Images(self.pixels[indices], self.labels[indices])


@dataclass(frozen=True)
class PixelStorage:
    """Room for decoded images: memory, or files for arrays that would take too much of it.

    Attributes:
        folder: where files go; they have no name there, so that nothing is left behind, however the process ends.
        memory: bytes up to which an array is in memory.
    """

    folder: Path
    memory: int = MEMORY

    def allocate(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return an uninitialised array of this shape, or raise DatasetError: no room on the disk."""
        size = math.prod(shape)
        if size <= self.memory:
            return np.empty(shape, np.uint8)
        try:
            # Checked first: to reserve more than there is fills the disk for everybody before it fails.
            if size > shutil.disk_usage(self.folder).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with tempfile.TemporaryFile(dir=self.folder) as file:
                if hasattr(os, "posix_fallocate"):  # else a full disk would end the process when a page is written
                    os.posix_fallocate(file.fileno(), 0, size)
                return np.memmap(file, np.uint8, "r+", shape=shape)
        except OSError as error:
            raise DatasetError(
                f"{self.folder}: no room for {size / 2**30:.1f} GiB of decoded pictures: {error.strerror}"
            ) from error


def channel_statistics(pixels: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of uint8 [N, C, H, W], scaled to 0...1, to four decimals."""
    # From the histogram of the 256 values: exact, and without a float copy of every pixel.
    counts = np.zeros((pixels.shape[1], 256), np.int64)
    for start in range(0, len(pixels), 1000):
        for channel, plane in enumerate(np.moveaxis(pixels[start : start + 1000], 1, 0)):
            counts[channel] += np.bincount(plane.reshape(-1), minlength=256)
    values = np.arange(256) / 255
    means = [float((row * values).sum() / row.sum()) for row in counts]
    variances = [float((row * (values - mean) ** 2).sum() / row.sum()) for row, mean in zip(counts, means, strict=True)]
    return tuple(round(mean, 4) for mean in means), tuple(round(variance**0.5, 4) for variance in variances)
