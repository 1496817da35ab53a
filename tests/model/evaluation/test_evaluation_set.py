from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from model.errors import DatasetError
from model.evaluation.evaluation_set import UPLOADS, open_evaluation_set
from tests.model.training.synthetic import LABELS


def write(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(path)


def test_a_folder_of_classes_is_measured_whole(tmp_path: Path) -> None:
    for number, name in enumerate(("dog/1.png", "cat/1.png", "cat/2.png")):
        write(tmp_path / name, number)
    found = open_evaluation_set(tmp_path)
    assert (found.names, found.split, len(found), found.variants) == (("cat", "dog"), "", 3, {})
    assert found.labels.tolist() == [0, 0, 1]
    assert found.upload(2) == (tmp_path / "dog" / "1.png").read_bytes()


def test_of_a_folder_with_splits_the_test_pictures_are_measured(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("val", 2), ("test", 1)):
        for name in ("cat", "dog"):
            for number in range(count):
                write(tmp_path / split / name / f"{number}.png", number)
    found = open_evaluation_set(tmp_path)
    assert (found.split, len(found)) == ("test", 2)


def test_classes_are_matched_with_the_models_by_name(tmp_path: Path) -> None:
    write(tmp_path / "dog" / "1.png", 0)
    write(tmp_path / "cat" / "1.png", 0)
    found = open_evaluation_set(tmp_path)
    assert found.truth(("bird", "dog", "cow", "cat"), "m").tolist() == [3, 1]
    with pytest.raises(DatasetError, match="model m, by name: dog"):
        found.truth(("bird", "cat"), "m")
    with pytest.raises(DatasetError, match="by name: cat"):
        found.truth(("cat", "dog", "cat"), "m")


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    write(tmp_path / "dog" / "1.png", 0)
    write(tmp_path / "cat" / "1.png", 0)
    found = open_evaluation_set(tmp_path)
    (tmp_path / "cat" / "1.png").unlink()
    with pytest.raises(DatasetError, match=r"1\.png: cannot be read"):
        found.upload(0)


def test_cifar10_is_its_test_images_and_their_variants(cifar: Path) -> None:
    found = open_evaluation_set(cifar)
    assert (found.names, found.split, len(found)) == (LABELS, "test", 100)
    assert list(found.variants) == list(UPLOADS)
    assert found.upload(7).startswith(b"\x89PNG")
    assert all(upload(1) for upload in found.variants.values())
