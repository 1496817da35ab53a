"""CIFAR-10's binary version: an image is a label and 32 x 32 pixels, plane by plane.

Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html.
"""

import io
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from model.errors import DatasetError
from model.extensions.datasets.pictures import Images, PictureFiles

IMAGE_SIZE: Final = (32, 32)
CHANNELS: Final = 3
CLASSES: Final = 10
TRAIN_FILES: Final = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES: Final = ("test_batch.bin",)
LABELS_FILE: Final = "batches.meta.txt"
_RECORD_BYTES: Final = 1 + CHANNELS * IMAGE_SIZE[0] * IMAGE_SIZE[1]


def is_cifar10(folder: Path) -> bool:
    """Return whether a folder holds a file of CIFAR-10's binary version."""
    return any((folder / name).is_file() for name in (*TRAIN_FILES, *TEST_FILES, LABELS_FILE))


def read(folder: Path, names: tuple[str, ...]) -> Images:
    """Read the images of some files, in file order.

    Raises:
        DatasetError: a file is missing, empty or cut short, or has an unknown label.
    """
    parts = []
    for path in (folder / name for name in names):
        try:
            data = np.fromfile(path, dtype=np.uint8)
        except OSError as error:
            expected = "expected the binary version of CIFAR-10"
            raise DatasetError(f"{path}: cannot be read: {error.strerror} ({expected})") from error
        if data.size == 0 or data.size % _RECORD_BYTES:
            raise DatasetError(
                f"{path}: {data.size} bytes are not a whole number of {_RECORD_BYTES}-byte records"
            )
        parts.append(data.reshape(-1, _RECORD_BYTES))
        record = int(parts[-1][:, 0].argmax())
        if (label := parts[-1][record, 0]) >= CLASSES:
            raise DatasetError(
                f"{path}: record {record} has label {label}, expected 0...{CLASSES - 1}"
            )
    records = np.concatenate(parts)
    return Images(records[:, 1:].reshape(-1, CHANNELS, *IMAGE_SIZE), records[:, 0].astype(np.int64))


def read_files(folder: Path, names: tuple[str, ...]) -> PictureFiles:
    """Read the images of some files as files of pictures; see `read`."""
    images = read(folder, names)

    def encode(number: int) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(images.pixels[number].transpose(1, 2, 0))).save(
            buffer, "BMP"
        )
        return buffer.getvalue()

    kind = "test" if names == TEST_FILES else "training"
    return PictureFiles(images.labels, encode, lambda number: f"{kind} image {number}")


def read_labels(folder: Path) -> tuple[str, ...]:
    """Read the names of the classes, in index order.

    Raises:
        DatasetError: the file cannot be read, or does not name ten classes.
    """
    path = folder / LABELS_FILE
    try:
        labels = tuple(path.read_text(encoding="utf-8-sig").split())
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from error
    if len(labels) != CLASSES:
        raise DatasetError(f"{path}: names {len(labels)} classes instead of {CLASSES}")
    return labels
