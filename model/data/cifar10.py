"""CIFAR-10's binary version: 3,073 bytes an image, a label and 32 x 32 pixels plane by plane.

Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from model.config import PreprocessConfig
from model.data.labelled_images import Images, PixelStorage
from model.errors import DatasetError
from model.images.preprocess import preprocess

IMAGE_SIZE: Final = (32, 32)
CHANNELS: Final = 3
CLASSES: Final = 10
TRAIN_FILES: Final = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES: Final = ("test_batch.bin",)
LABELS_FILE: Final = "batches.meta.txt"
_RECORD_BYTES: Final = 1 + CHANNELS * IMAGE_SIZE[0] * IMAGE_SIZE[1]


def read_train(folder: Path) -> Images:
    """Read all training images, in file order.

    Raises:
        DatasetError: a file is missing, empty, cut short, or holds a label that is no class.
    """
    return _read(folder, TRAIN_FILES)


def read_test(folder: Path) -> Images:
    """Read all test images, in file order: not for training, nor for any choice made while training.

    Raises:
        DatasetError: as `read_train`.
    """
    return _read(folder, TEST_FILES)


def check_test_file(folder: Path) -> None:
    """Raise DatasetError if the file of `read_test` is missing or not a whole number of records long; it stays shut."""
    path = folder / TEST_FILES[0]
    try:
        _check_size(path, path.stat().st_size)
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {_reason(error)}") from error


def resize(images: Images, config: PreprocessConfig, storage: PixelStorage, *, progress: bool = True) -> Images:
    """Bring images of `IMAGE_SIZE` to a model's size, as the service would if they were uploaded.

    Raises:
        DatasetError: no room on the disk.
    """
    if config.size == config.resize_size == IMAGE_SIZE:
        return images
    pixels = storage.allocate((len(images), CHANNELS, *config.size))

    def work(index: int) -> None:
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(images.pixels[index].transpose(1, 2, 0))).save(file, "BMP")
        pixels[index] = preprocess(file.getvalue(), config).transpose(2, 0, 1)

    with ThreadPoolExecutor() as pool:
        done = pool.map(work, range(len(images)))
        for _ in tqdm(done, total=len(images), desc="resize", disable=None if progress else True):
            pass
    return Images(pixels, images.labels)


def read_labels(folder: Path) -> tuple[str, ...]:
    """Read the names of the classes, in index order.

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


def split_validation(images: Images, count: int, seed: int) -> tuple[Images, Images]:
    """Split images into (training, validation); the latter are the last `count` of a seeded permutation.

    Raises:
        DatasetError: one of the two would be empty.
    """
    if not 0 < count < len(images):
        raise DatasetError(f"cannot set {count} of {len(images)} training images aside for validation")
    order = np.random.default_rng(seed).permutation(len(images))
    return images.take(order[:-count]), images.take(order[-count:])


def _read(folder: Path, names: tuple[str, ...]) -> Images:
    records = np.concatenate([_read_records(folder / name) for name in names])
    # Copied, so that the labels' bytes do not stay in memory between the pixels.
    pixels = records[:, 1:].reshape(-1, CHANNELS, *IMAGE_SIZE).copy()
    return Images(pixels, records[:, 0].astype(np.int64))


def _read_records(path: Path) -> NDArray[np.uint8]:
    """Read a file's records, uint8 [N, 3073]."""
    try:
        data = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        hint = "expected the binary version of CIFAR-10"
        raise DatasetError(f"{path}: cannot be read: {_reason(error)} ({hint})") from error
    _check_size(path, data.size)
    records = data.reshape(-1, _RECORD_BYTES)
    worst = int(records[:, 0].max())
    if worst >= CLASSES:
        record = int(records[:, 0].argmax())
        raise DatasetError(f"{path}: record {record} has label {worst}, expected 0...{CLASSES - 1}")
    return records


def _check_size(path: Path, size: int) -> None:
    if size == 0 or size % _RECORD_BYTES:
        raise DatasetError(f"{path}: {size} bytes are not a whole number of {_RECORD_BYTES}-byte records")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
