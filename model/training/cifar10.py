"""CIFAR-10's binary version: 3,073 bytes an image, a label and 32 x 32 pixels plane by plane.

Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model.errors import DatasetError

IMAGE_SIZE: Final = (32, 32)
CHANNELS: Final = 3
CLASSES: Final = 10
TRAIN_FILES: Final = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES: Final = ("test_batch.bin",)
LABELS_FILE: Final = "batches.meta.txt"
_RECORD: Final = 1 + CHANNELS * IMAGE_SIZE[0] * IMAGE_SIZE[1]


@dataclass(frozen=True)
class Images:
    """Labelled pictures in memory.

    Attributes:
        pixels: uint8 [N, C, H, W], RGB.
        labels: int64 [N].
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: NDArray[np.int64]) -> Images:
        """The pictures at `indices`, in that order."""
        return Images(self.pixels[indices], self.labels[indices])


def read_train(folder: Path) -> Images:
    """All training pictures, in file order.

    Raises:
        DatasetError: a file is missing, empty, cut short, or holds a label that is no class.
    """
    return _read(folder, TRAIN_FILES)


def read_test(folder: Path) -> Images:
    """All test pictures, in file order. Not for training, nor for any choice made while training.

    Raises:
        DatasetError: as `read_train`.
    """
    return _read(folder, TEST_FILES)


def read_labels(folder: Path) -> tuple[str, ...]:
    """Names of the classes, in index order.

    Raises:
        DatasetError: the file is missing or does not name ten classes.
    """
    path = folder / LABELS_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: cannot be read: {_reason(error)}") from error
    labels = tuple(line.strip() for line in text.splitlines() if line.strip())
    if len(labels) != CLASSES:
        raise DatasetError(f"{path}: names {len(labels)} classes instead of {CLASSES}")
    return labels


def hold_out(images: Images, count: int, seed: int) -> tuple[Images, Images]:
    """Split training pictures into (kept for training, held out): the last `count` of a seeded permutation.

    Raises:
        DatasetError: nothing would be left to train on, or nothing held out.
    """
    if not 0 < count < len(images):
        raise DatasetError(f"cannot hold {count} of {len(images)} training images out")
    order = np.random.default_rng(seed).permutation(len(images))
    return images.take(order[:-count]), images.take(order[-count:])


def _read(folder: Path, names: tuple[str, ...]) -> Images:
    records = np.concatenate([_read_records(folder / name) for name in names])
    # Copied, so that the labels' bytes do not stay in memory between the pixels.
    pixels = records[:, 1:].reshape(-1, CHANNELS, *IMAGE_SIZE).copy()
    return Images(pixels, records[:, 0].astype(np.int64))


def _read_records(path: Path) -> NDArray[np.uint8]:
    """uint8 [N, 3073]."""
    try:
        data = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DatasetError(
            f"{path}: cannot be read: {_reason(error)} (expected the binary version of CIFAR-10)"
        ) from error
    if data.size == 0 or data.size % _RECORD:
        raise DatasetError(f"{path}: {data.size} bytes are not a whole number of {_RECORD}-byte records")
    records = data.reshape(-1, _RECORD)
    worst = int(records[:, 0].max())
    if worst >= CLASSES:
        record = int(records[:, 0].argmax())
        raise DatasetError(f"{path}: record {record} has label {worst}, expected 0...{CLASSES - 1}")
    return records


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
