from __future__ import annotations

import csv
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from model.data.cifar10 import read_train
from model.data.datasets import Cifar10Dataset, FolderDataset, open_dataset
from model.data.labelled_images import PixelStorage
from model.errors import DatasetError
from tests.model.data.configs import bicubic_config
from tests.model.data.picture_folders import write_folder


def rows_of(dataset: FolderDataset) -> list[dict[str, str]]:
    return list(csv.DictReader(dataset.split_csv().splitlines()))


def test_the_kind_of_data_is_recognised(cifar: Path, tmp_path: Path) -> None:
    assert isinstance(open_dataset(cifar, 80, 0), Cifar10Dataset)
    assert isinstance(open_dataset(write_folder(tmp_path / "data", 3), 0.3, 0), FolderDataset)
    (tmp_path / "batches.meta").touch()
    with pytest.raises(DatasetError, match="the Python version of CIFAR-10"):
        open_dataset(tmp_path, 0.3, 0)


def test_cifar_pictures_stay_as_they_are_at_their_own_size(cifar: Path, tmp_path: Path) -> None:
    dataset = open_dataset(cifar, 0.2, 0)
    assert (dataset.train_count, dataset.validation_count) == (320, 80)
    train, validation = dataset.load(
        bicubic_config(32, 32), bicubic_config(32, 32), PixelStorage(tmp_path), progress=False
    )
    both = np.concatenate([train.pixels, validation.pixels]).reshape(400, -1)
    assert sorted(map(bytes, both)) == sorted(map(bytes, read_train(cifar).pixels.reshape(400, -1)))


def test_cifar_pictures_are_resized_as_an_upload_would_be(cifar: Path, tmp_path: Path) -> None:
    dataset = open_dataset(cifar, 80, 0)
    small, _ = dataset.load(bicubic_config(32, 32), bicubic_config(32, 32), PixelStorage(tmp_path), progress=False)
    large, validation = dataset.load(
        bicubic_config(48, 48), bicubic_config(40, 24), PixelStorage(tmp_path), progress=False
    )
    assert validation.pixels.shape == (80, 3, 40, 24)
    resized = Image.fromarray(small.pixels[7].transpose(1, 2, 0)).resize((48, 48), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(large.pixels[7].transpose(1, 2, 0), np.asarray(resized))
    assert large.labels.tolist() == small.labels.tolist()


def test_a_folder_is_split_by_class_and_the_split_is_told(tmp_path: Path) -> None:
    dataset = FolderDataset(write_folder(tmp_path / "data", 10), 0.2, 0)
    rows = rows_of(dataset)
    assert (dataset.train_count, dataset.validation_count) == (24, 6)
    assert [row["class"] for row in rows if row["split"] == "validation"] == ["blue"] * 2 + ["green"] * 2 + ["red"] * 2
    assert len({row["file"] for row in rows}) == 30
    assert all((tmp_path / "data" / row["file"]).is_file() for row in rows)
    assert FolderDataset(tmp_path / "data", 0.2, 1).split_csv() != dataset.split_csv()


def test_a_split_that_is_given_is_used_whatever_the_recipe_says(tmp_path: Path) -> None:
    dataset = _with_test_set(tmp_path / "data")
    train, validation = dataset.load(
        bicubic_config(18, 18), bicubic_config(16, 16), PixelStorage(tmp_path), progress=False
    )
    test = dataset.load_test(bicubic_config(16, 16), PixelStorage(tmp_path), progress=False)
    assert [len(images) for images in (train, validation, test)] == [15, 9, 6]
    assert [images.pixels.shape[2:] for images in (train, validation, test)] == [(18, 18), (16, 16), (16, 16)]
    assert [row["file"].split("/")[0] for row in rows_of(dataset)] == ["train"] * 15 + ["val"] * 9 + ["test"] * 6


def test_the_test_set_too_goes_to_a_file_where_memory_is_short(cifar: Path, tmp_path: Path) -> None:
    storage = PixelStorage(tmp_path, memory=0)
    for dataset in (open_dataset(cifar, 80, 0), _with_test_set(tmp_path / "data")):
        assert isinstance(dataset.load_test(bicubic_config(16, 16), storage, progress=False).pixels, np.memmap)


def _with_test_set(root: Path) -> FolderDataset:
    for seed, (name, count) in enumerate({"train": 5, "val": 3, "test": 2}.items()):
        write_folder(root / name, count, seed=seed)
    return FolderDataset(root, 5000, 0)


def test_bad_pictures_of_all_splits_are_told_before_training(tmp_path: Path) -> None:
    root = tmp_path / "data"
    for name in ("train", "val", "test"):
        write_folder(root / name, 2)
        (root / name / "red" / "bad.jpg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(DatasetError) as caught:
        FolderDataset(root, 0.2, 0).load(
            bicubic_config(16, 16), bicubic_config(16, 16), PixelStorage(tmp_path), progress=False
        )
    assert [Path(line.split(": ")[0]).parts[-3] for line in str(caught.value).splitlines()[1:]] == [
        "test",
        "train",
        "val",
    ]


def test_copies_across_splits_and_classes_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "data"
    for seed, name in enumerate(("train", "val")):
        write_folder(root / name, 3, seed=seed)
    load = (bicubic_config(16, 16), bicubic_config(16, 16), PixelStorage(tmp_path))
    with caplog.at_level(logging.WARNING):
        FolderDataset(root, 0.2, 0).load(*load, progress=False)
    assert caplog.messages == []
    shutil.copy(root / "train" / "red" / "001.png", root / "val" / "red" / "copy.png")
    shutil.copy(root / "train" / "blue" / "001.png", root / "train" / "green" / "copy.png")
    with caplog.at_level(logging.WARNING):
        FolderDataset(root, 0.2, 0).load(*load, progress=False)
    assert caplog.messages == [
        f"{root}: 1 validation pictures are copies of training pictures",
        f"{root}: 1 pictures are in more than one class",
    ]
