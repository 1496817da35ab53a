from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from model.data.cifar10 import read_labels, read_test, read_train, split_validation
from model.data.labelled_images import Images
from model.errors import DatasetError
from tests.model.training.synthetic import LABELS


def write_record(path: Path, label: int, pixels: np.ndarray) -> None:
    path.write_bytes(bytes([label]) + pixels.astype(np.uint8).tobytes())


def test_a_record_is_a_label_then_red_green_and_blue_planes_row_by_row(cifar: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (3, 32, 32))
    write_record(cifar / "test_batch.bin", 7, pixels)
    images = read_test(cifar)
    assert images.labels.tolist() == [7]
    assert images.pixels.dtype == np.uint8
    np.testing.assert_array_equal(images.pixels[0], pixels)


def test_training_images_come_from_all_five_files_in_order(cifar: Path) -> None:
    for number in range(1, 6):
        write_record(cifar / f"data_batch_{number}.bin", number, np.full((3, 32, 32), number))
    images = read_train(cifar)
    assert images.labels.tolist() == [1, 2, 3, 4, 5]
    assert images.pixels[:, 0, 0, 0].tolist() == [1, 2, 3, 4, 5]


def test_labels_are_read_in_order_and_the_blank_last_line_is_none_of_them(cifar: Path) -> None:
    assert read_labels(cifar) == LABELS


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda _: b"", lambda data: data + b"\x00"])
def test_a_file_of_the_wrong_length_is_named(cifar: Path, damage: Callable[[bytes], bytes]) -> None:
    path = cifar / "data_batch_3.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DatasetError, match=r"data_batch_3\.bin.*3073"):
        read_train(cifar)


def test_a_label_that_is_no_class_is_named_with_its_record(cifar: Path) -> None:
    path = cifar / "test_batch.bin"
    data = bytearray(path.read_bytes())
    data[3073 * 2] = 10
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"test_batch\.bin: record 2 has label 10"):
        read_test(cifar)


def test_a_missing_file_is_named(cifar: Path) -> None:
    (cifar / "data_batch_5.bin").unlink()
    with pytest.raises(DatasetError, match=r"data_batch_5\.bin"):
        read_train(cifar)
    (cifar / "batches.meta.txt").unlink()
    with pytest.raises(DatasetError, match=r"batches\.meta\.txt"):
        read_labels(cifar)


def test_a_label_file_with_too_few_names_is_refused(cifar: Path) -> None:
    (cifar / "batches.meta.txt").write_text("cat\ndog\n")
    with pytest.raises(DatasetError, match="2 classes instead of 10"):
        read_labels(cifar)


def numbered(count: int) -> Images:
    """Image i holds i in its first two pixels."""
    pixels = np.zeros((count, 3, 32, 32), dtype=np.uint8)
    pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = np.arange(count) // 256, np.arange(count) % 256
    return Images(pixels, np.arange(count))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_validation_split_neither_overlaps_nor_loses_an_image(seed: int) -> None:
    kept, validation = split_validation(numbered(600), 77, seed)
    assert (len(kept), len(validation)) == (523, 77)
    assert sorted([*kept.labels, *validation.labels]) == list(range(600))
    for part in (kept, validation):  # each label stays with its picture
        assert (part.pixels[:, 0, 0, 0].astype(int) * 256 + part.pixels[:, 0, 0, 1] == part.labels).all()


def test_the_validation_split_follows_the_seed() -> None:
    first, again, other = (split_validation(numbered(600), 77, seed)[1].labels.tolist() for seed in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.parametrize("count", [0, 600])
def test_setting_none_or_all_aside_is_refused(count: int) -> None:
    with pytest.raises(DatasetError, match=f"{count} of 600"):
        split_validation(numbered(600), count, 0)
