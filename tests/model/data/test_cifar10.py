from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from model.data.cifar10 import TEST_FILES, TRAIN_FILES, read, read_labels
from model.errors import DatasetError
from tests.model.training.synthetic import LABELS


def write_record(path: Path, label: int, pixels: np.ndarray) -> None:
    path.write_bytes(bytes([label]) + pixels.astype(np.uint8).tobytes())


def test_a_record_is_a_label_then_red_green_and_blue_planes_row_by_row(cifar: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (3, 32, 32))
    write_record(cifar / "test_batch.bin", 7, pixels)
    images = read(cifar, TEST_FILES)
    assert images.labels.tolist() == [7]
    assert images.pixels.dtype == np.uint8
    np.testing.assert_array_equal(images.pixels[0], pixels)
    assert read_labels(cifar) == LABELS


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda _: b"", lambda data: data + b"\x00"])
def test_a_file_of_the_wrong_length_is_named(cifar: Path, damage: Callable[[bytes], bytes]) -> None:
    path = cifar / "data_batch_3.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DatasetError, match=r"data_batch_3\.bin.*3073"):
        read(cifar, TRAIN_FILES)


def test_bad_labels_and_missing_files_are_named(cifar: Path) -> None:
    path = cifar / "test_batch.bin"
    data = bytearray(path.read_bytes())
    data[3073 * 2] = 10
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"test_batch\.bin: record 2 has label 10"):
        read(cifar, TEST_FILES)
    (cifar / "data_batch_5.bin").unlink()
    with pytest.raises(DatasetError, match=r"data_batch_5\.bin: cannot be read"):
        read(cifar, TRAIN_FILES)
    (cifar / "batches.meta.txt").write_text("cat\ndog\n")
    with pytest.raises(DatasetError, match="2 classes instead of 10"):
        read_labels(cifar)
    (cifar / "batches.meta.txt").unlink()
    with pytest.raises(DatasetError, match=r"batches\.meta\.txt"):
        read_labels(cifar)
