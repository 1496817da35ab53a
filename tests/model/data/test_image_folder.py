from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from model.data.image_folder import find_pictures
from model.errors import DatasetError
from tests.model.data.picture_folders import write_class, write_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data", 3)


def split_root(tmp_path: Path, *names: str) -> Path:
    for name in names:
        write_folder(tmp_path / "data" / name, 2)
    return tmp_path / "data"


def test_classes_are_the_sorted_names_of_the_folders(root: Path) -> None:
    found = find_pictures(root)
    assert found.labels == ("blue", "green", "red")
    assert found.validation is found.test is None
    assert found.train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [found.train.name(number) for number in (3, 4)] == [str(root / "green" / f"00{n}.png") for n in range(2)]


@pytest.mark.parametrize("validation", ["val", "validation"])
def test_splits_that_are_given_are_kept(tmp_path: Path, validation: str) -> None:
    root = split_root(tmp_path, "train", validation, "test")
    found = find_pictures(root)
    assert found.validation is not None
    assert found.test is not None
    parts = {"train": found.train, validation: found.validation, "test": found.test}
    for name, files in parts.items():
        paths = [Path(files.name(number)) for number in range(len(files))]
        assert {path.relative_to(root).parts[0] for path in paths} == {name}
        assert files.labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_pictures_may_lie_deeper_and_linked_files_and_classes_count(root: Path, tmp_path: Path) -> None:
    write_class(root / "red" / "more" / "still", "red", 1)
    elsewhere = write_class(tmp_path / "elsewhere", "blue", 2)
    (root / "cyan").symlink_to(tmp_path / "elsewhere")
    (root / "blue" / "linked.png").symlink_to(elsewhere[0])
    found = find_pictures(root)
    assert found.labels == ("blue", "cyan", "green", "red")
    assert found.train.labels.tolist() == [0] * 4 + [1] * 2 + [2] * 3 + [3] * 4


def test_what_is_hidden_or_beside_the_classes_is_passed_over(root: Path) -> None:
    before = len(find_pictures(root).train)
    for name in ("red/.DS_Store", "red/Thumbs.db", "red/desktop.ini", ".git/config", "red/.thumbs/1.png", "README.md"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("x")
    assert len(find_pictures(root).train) == before


def _one_class(root: Path) -> None:
    for name in ("blue", "green"):
        for path in (root / name).iterdir():
            path.unlink()
        (root / name).rmdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "empty").mkdir(), "empty: the class has no pictures"),
        (lambda root: (root / "junk" / ".git").mkdir(parents=True), "junk: the class has no pictures"),
        (_one_class, "one class"),
    ],
    ids=["empty class", "class with hidden files", "one class"],
)
def test_a_folder_that_cannot_be_trained_on_is_refused(
    root: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(root)
    with pytest.raises(DatasetError, match=message) as caught:
        find_pictures(root)
    assert "\n" not in str(caught.value)


def test_no_folder_no_classes_and_pictures_without_a_class_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="none: cannot be read: No such file"):
        find_pictures(tmp_path / "none")
    write_class(tmp_path / "flat", "red", 2)
    with pytest.raises(DatasetError, match="flat: no pictures: expected one folder of them for each class"):
        find_pictures(tmp_path / "flat")


def test_a_name_that_is_no_text_is_refused(root: Path) -> None:
    os.mkdir(os.fsencode(root) + b"/\xff")  # noqa: PTH102  a Path would need the surrogate spelled out
    with pytest.raises(DatasetError, match="cannot be printed"):
        find_pictures(root)


def test_splits_must_have_the_same_classes(tmp_path: Path) -> None:
    root = split_root(tmp_path, "train", "val")
    for path in (root / "val" / "red").iterdir():
        path.unlink()
    with pytest.raises(DatasetError, match=r"val/red: the class has no pictures"):
        find_pictures(root)
    (root / "val" / "red").rmdir()
    with pytest.raises(DatasetError, match="val: its classes are not those of train/: 'red' is in one alone"):
        find_pictures(root)
    write_class(root / "val" / "red", "red", 1)
    write_class(root / "val" / "pink", "red", 1)
    with pytest.raises(DatasetError, match="'pink' is in one alone"):
        find_pictures(root)


def test_a_folder_beside_the_splits_and_two_validation_splits_are_refused(tmp_path: Path) -> None:
    root = split_root(tmp_path, "train", "val", "validation")
    with pytest.raises(DatasetError, match="both val and validation"):
        find_pictures(root)
    (root / "validation").rename(root / "extra")
    with pytest.raises(DatasetError, match=r"extra: beside train/ only val, validation, test are expected"):
        find_pictures(root)
