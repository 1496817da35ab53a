"""Folders of pictures: classes, splits, and notes on other files."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from model.errors import DatasetError
from model.extensions.datasets.folders import find_pictures
from model.extensions.datasets.split_names import role_of
from model.extensions.datasets.split_record import SplitRecord
from tests.extensions.datasets.picture_folders import write_class, write_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data", 3)


def split_root(tmp_path: Path, *names: str) -> Path:
    for seed, name in enumerate(names):
        write_folder(tmp_path / "data" / name, 2, seed=seed)
    return tmp_path / "data"


def test_classes_are_sorted_folder_names(root: Path) -> None:
    found = find_pictures(root)
    assert found.labels == ("blue", "green", "red")
    assert list(found.sets) == ["train"]
    assert (found.folders, found.notes) == ({}, ())
    train = found.sets["train"]
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [train.name(number) for number in (3, 4)] == [
        str(root / "green" / f"00{n}.png") for n in range(2)
    ]


def test_nested_pictures_count_for_a_class(root: Path, tmp_path: Path) -> None:
    write_class(root / "red" / "more" / "still", "red", 1)
    elsewhere = write_class(tmp_path / "elsewhere", "blue", 2)
    (root / "cyan").symlink_to(tmp_path / "elsewhere")
    (root / "blue" / "linked.png").symlink_to(elsewhere[0])
    found = find_pictures(root)
    assert found.labels == ("blue", "cyan", "green", "red")
    assert found.sets["train"].labels.tolist() == [0] * 4 + [1] * 2 + [2] * 3 + [3] * 4
    assert found.notes == (
        f"{root}: pictures in folders below a class folder count for the class: red/more/still",
    )


def test_junk_is_skipped_silently(root: Path) -> None:
    before = len(find_pictures(root).sets["train"])
    for name in (
        "red/.DS_Store",
        "red/Thumbs.db",
        "red/desktop.ini",
        ".git/config",
        "red/.thumbs/1.png",
    ):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("x")
    for name in (
        "__MACOSX/red",
        ".ipynb_checkpoints",
        "lost+found",
        "@eaDir",
        "red/.ipynb_checkpoints",
    ):
        write_class(root / name, "red", 1)
    assert len(find_pictures(root).sets["train"]) == before
    assert find_pictures(root).labels == ("blue", "green", "red")
    assert find_pictures(root).notes == ()


def test_ignored_files_are_noted(root: Path) -> None:
    (root / "README.md").write_text("x")
    (root / "stray.jpg").write_text("x")
    os.mkfifo(root / "blue" / "pipe.png")
    assert find_pictures(root).notes == (
        f"{root}: left out: 2 outside the class folders (README.md, stray.jpg); "
        "1 not regular files (blue/pipe.png)",
    )


@pytest.mark.parametrize(
    ("names", "role"),
    [
        (
            "train TRAIN Training training_set seg_train train2017 trainset TrainData cats-train "
            "entraînement",
            "train",
        ),
        ("Trainingsdaten entrenamiento 训练集 訓練 tr train_val 1_train", "train"),
        ("trening trénovací träning eğitim навчання тренировка تدريب אימון", "train"),
        ("val valid Validation VAL2017 valset dev validación Validierung 验证集", "validation"),
        (
            "Validierungsdaten walidacja validatie doğrulama convalida",
            "validation",
        ),
        ("테스트 testowy testovací тестовая اختبار בדיקה Testmenge", "test"),
        (
            "test Testing test_set test1 eval hold-out HoldOut prueba Prüfung évaluation 测试集",
            "test",
        ),
    ],
)
def test_common_names_mean_splits(names: str, role: str) -> None:
    assert {name: role_of(name) for name in names.split()} == dict.fromkeys(names.split(), role)


def test_class_names_are_not_split_names() -> None:
    names = (
        "cat",
        "strain",
        "tram",
        "contest",
        "valley",
        "device",
        "validator",
        "t",
        "7",
        "tram-tests-val",
    )
    assert {name: role_of(name) for name in names} == dict.fromkeys(names)


@pytest.mark.parametrize(
    "names",
    [
        ("train", "val", "test"),
        ("Training", "Validation", "Testing"),
        ("seg_train/seg_train", "seg_dev/seg_dev", "seg_test/seg_test"),
        ("archive/train", "archive/valid", "archive/test"),
        ("test_data/train", "test_data/valid", "test_data/holdout"),
    ],
    ids=" ".join,
)
def test_splits_by_any_name_are_kept_apart(tmp_path: Path, names: tuple[str, ...]) -> None:
    root = split_root(tmp_path, *names)
    found = find_pictures(root)
    assert found.labels == ("blue", "green", "red")
    for split, name in zip(("train", "validation", "test"), names, strict=True):
        files = found.sets[split]
        assert {Path(files.name(number)).parent.parent for number in range(len(files))} == {
            root / name
        }
        assert files.labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_split_that_is_named_is_read_alone(tmp_path: Path) -> None:
    root = split_root(tmp_path, "seg_train/seg_train", "seg_test/seg_test")
    found = find_pictures(root / "seg_test")
    assert (found.labels, found.folders, found.notes) == (("blue", "green", "red"), {}, ())
    assert len(found.sets["train"]) == 6


def test_splits_below_classes_are_kept_apart(tmp_path: Path) -> None:
    for colour in ("blue", "red"):
        write_class(tmp_path / colour / "Train", colour, 3)
        write_class(tmp_path / colour / "Test", colour, 2)
    found = find_pictures(tmp_path)
    assert (found.labels, found.folders) == (
        ("blue", "red"),
        {"train": "*/Train", "test": "*/Test"},
    )
    assert [len(files) for files in found.sets.values()] == [6, 4]
    write_class(tmp_path / "green", "green", 2)
    with pytest.raises(
        DatasetError, match=r"green: is not split like blue/, which has Test/ and Train/"
    ):
        find_pictures(tmp_path)


def test_folder_named_train_may_be_a_class(tmp_path: Path) -> None:
    for name in ("train", "bus", "car"):
        write_class(tmp_path / name, "red", 2)
    assert find_pictures(tmp_path).labels == ("bus", "car", "train")


def test_classes_may_have_other_subfolders(tmp_path: Path) -> None:
    for name in ("animal/cat", "animal/dog", "vehicle/bus", "vehicle/car"):
        write_class(tmp_path / name, "red", 1)
    found = find_pictures(tmp_path)
    assert found.labels == ("animal", "vehicle")
    assert found.notes[0].endswith(
        "count for the class: animal/cat, animal/dog, vehicle/bus, vehicle/car"
    )


def test_other_folders_are_noted(tmp_path: Path) -> None:
    root = split_root(tmp_path, "seg_train/seg_train", "seg_test/seg_test")
    write_class(root / "seg_pred" / "seg_pred", "red", 2)
    (root / "annotations").mkdir()
    (root / "seg_test" / "labels.csv").write_text("x")
    found = find_pictures(root)
    assert found.folders == {"train": "seg_train", "test": "seg_test"}
    assert found.notes == (
        f"{root}: left out: 3 outside the class folders "
        "(annotations, seg_pred, seg_test/labels.csv)",
        f"{root}: labels are the names of folders, and not read from a table "
        "(seg_test/labels.csv): if they differ, move the pictures",
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("a", "b"),
            r"data: a/, b/ look like splits: .*rename to train, val or test, "
            r".* --data \S+/data/a or ",
        ),
        (
            ("train", "extra"),
            r"extra/: not clear for what: .*--data \S+/data/extra or --data \S+/data/train",
        ),
        (
            ("train", "val", "validation"),
            r"val/ and validation/ are both named like the validation split; keep one",
        ),
    ],
)
def test_splits_of_unclear_names_are_refused(
    tmp_path: Path, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        find_pictures(split_root(tmp_path, *names))


def test_splits_without_classes_are_refused(tmp_path: Path) -> None:
    for name in ("train", "test1"):
        write_class(tmp_path / name, "red", 2)
    with pytest.raises(
        DatasetError, match="test1/, train/ are named like splits, but have no class folders: put"
    ):
        find_pictures(tmp_path)


def test_unlabelled_pictures_are_no_class(tmp_path: Path) -> None:
    write_class(tmp_path / "labeled" / "cat", "red", 1)
    write_class(tmp_path / "labeled" / "dog", "blue", 1)
    write_class(tmp_path / "unlabeled", "green", 1)
    with pytest.raises(DatasetError, match=r"unlabeled: .* --data \S+/labeled$"):
        find_pictures(tmp_path)


def test_spaces_around_a_class_are_removed(root: Path) -> None:
    (root / "red").rename(root / "red ")
    assert find_pictures(root).labels == ("blue", "green", "red")
    write_class(root / "red", "red", 1)
    with pytest.raises(DatasetError, match=r"two folders have the same name .* but for spaces"):
        find_pictures(root)


def test_an_archive_is_to_be_unpacked(tmp_path: Path) -> None:
    (tmp_path / "pets.zip").write_bytes(b"PK")
    with pytest.raises(DatasetError, match=r"pets.zip: a file, not a folder: unpack an archive"):
        find_pictures(tmp_path / "pets.zip")


def test_pictures_beside_classes_are_refused(tmp_path: Path) -> None:
    root = split_root(tmp_path, "train", "test")
    write_class(root / "train", "red", 2)
    with pytest.raises(DatasetError, match=r"train: .* move them into the class folders"):
        find_pictures(root)


def test_pictures_of_two_sets_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = split_root(tmp_path, "train", "val")
    shutil.copyfile(root / "train" / "red" / "000.png", root / "val" / "red" / "copy.png")
    record = SplitRecord.of(find_pictures(root).sets)
    record.log_leaks(None)
    assert (record.count_leaks("validation"), record.count_leaks("test")) == (1, 0)
    assert "1 of 7 validation pictures, such as " in caplog.text
    assert "copy.png, are training pictures, too" in caplog.text


def test_a_picture_of_two_labels_is_logged(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copyfile(root / "red" / "000.png", root / "blue" / "copy.png")
    folder = find_pictures(root)
    record = SplitRecord.of(folder.sets)
    record.log_contradictions(folder.sets, folder.labels)
    assert "1 pictures have two labels, such as: " in caplog.text
    assert "000.png is 'red', " in caplog.text
    caplog.clear()
    (root / "blue" / "copy.png").unlink()
    record.log_contradictions(find_pictures(root).sets, folder.labels)
    assert not caplog.text


def test_class_next_to_a_split_is_refused(tmp_path: Path) -> None:
    root = split_root(tmp_path, "train", "val")
    write_class(root / "bus", "red", 2)
    with pytest.raises(
        DatasetError, match=r"bus: has pictures of its own, but train/ beside it has folders like a"
    ):
        find_pictures(root)


def test_unwanted_split_is_refused(tmp_path: Path) -> None:
    root = split_root(tmp_path, "train", "val")
    found = find_pictures(root)
    chosen, notes = found.choose(["test", "validation"], "measure")
    assert (chosen, notes) == ("validation", (f"{root}: val/ is used to measure; train/ not used",))
    with pytest.raises(
        DatasetError, match=rf"no test split to measure; to use another .*: --data {root}/train$"
    ):
        found.choose(["test"], "measure")


@pytest.mark.parametrize(
    ("tables", "pictures", "refusal"),
    [
        (["metadata.csv"], ["1.png"], "1 pictures, but no class folders: .*; {}: move each"),
        (["labels.csv"], ["images/1.png"], r"one class \('images'\): .*; {}: move each"),
        (
            ["train/metadata.csv"],
            ["train/1.png", "test/2.png"],
            "test/, train/ are named like splits, but have no class folders; {}: put the pictures",
        ),
        (
            ["train/metadata.jsonl"],
            ["train/1.png"],
            "train/ is named like a split, but has no class folders; {}: put the pictures",
        ),
        (["images/labels.xlsx"], ["images/1.png"], r"one class \('images'\): .*; {}: move each"),
        (
            ["data/train/metadata.csv"],
            ["data/train/1.png"],
            r"one class \('data'\): .*; if its folders are the classes: --data .*; {}: move each",
        ),
        (
            ["data/test/metadata.csv", "data/train/_annotations.coco.json"],
            ["data/test/1.png", "data/train/1.png"],
            r"one class \('data'\): at least two classes are required; {}: move each",
        ),
        (
            ["train/metadata.csv", "validation/metadata.csv"],
            ["train/images/1.png", "validation/images/1.png"],
            r"train: one class \('images'\): .*; {}: move each",
        ),
    ],
)
@pytest.mark.parametrize("least_classes", [1, 2])
def test_tables_without_class_folders_are_named(
    tmp_path: Path, tables: list[str], pictures: list[str], refusal: str, least_classes: int
) -> None:
    for name in (*tables, *pictures):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    unread = rf"labels are the names of folders, and not read from a table \({tables[0]}[^)]*\)"
    with pytest.raises(DatasetError, match=refusal.format(unread)):
        find_pictures(tmp_path)


def test_links_between_classes_are_refused(root: Path) -> None:
    (root / "loop").symlink_to(root)
    with pytest.raises(
        DatasetError, match="loop: links to a folder around itself; remove the link"
    ):
        find_pictures(root)
    (root / "loop").unlink()
    (root / "rouge").symlink_to(root / "red")
    with pytest.raises(DatasetError, match=r"rouge: is the same folder as \S+/red; remove"):
        find_pictures(root)
    (root / "rouge").unlink()
    write_class(root / "red" / "dark", "red", 1)
    (root / "dark").symlink_to(root / "red" / "dark")
    with pytest.raises(
        DatasetError, match=r"dark: is inside \S+/red, so its pictures have two classes"
    ):
        find_pictures(root)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "empty").mkdir(), "empty: the class has no pictures"),
        (
            lambda root: (root / "junk" / ".git").mkdir(parents=True),
            "junk: the class has no pictures",
        ),
        (
            lambda root: [(root / name).rename(root.parent / name) for name in ("blue", "green")],
            "one class",
        ),
        (
            lambda root: write_class(root / "Red", "red", 1),
            "'Red' and 'red' differ only by case or spaces",
        ),
        (
            lambda root: (
                write_class(root / "a  b", "red", 1),
                write_class(root / "a b", "red", 1),
            ),
            "'a  b' and 'a b' differ only by case or spaces",
        ),
        (shutil.rmtree, "data: cannot be read: No such file"),
        (
            lambda root: (
                root.rename(root.parent / "pets"),
                root.mkdir(),
                (root.parent / "pets").rename(root / "pets"),
            ),
            r"one class \('pets'\): at least two .*; "
            r"if its folders are the classes: --data \S+/data/pets$",
        ),
        (
            lambda root: (root.rename(root.parent / "other"), root.mkdir()),
            "data: no pictures: expected one folder of them for each class",
        ),
        (
            lambda root: (root.rename(root.parent / "other"), write_class(root, "red", 2)),
            "data: 2 pictures, but no class folders: expected one folder of them for each class",
        ),
        # A Path would need the surrogate written out.
        (lambda root: os.mkdir(os.fsencode(root) + b"/\xff"), "cannot be printed: rename it"),  # noqa: PTH102
        (
            lambda root: (root / "cat\u200b").mkdir(),
            r"has U\+200B, which cannot be printed",
        ),
    ],
    ids=[
        "empty class",
        "hidden files",
        "one class",
        "case",
        "spaces",
        "no folder",
        "wrapped",
        "nothing",
        "no classes",
        "a name of bytes",
        "a hidden character",
    ],
)
def test_unusable_folder_is_refused(
    root: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(root)
    with pytest.raises(DatasetError, match=message) as caught:
        find_pictures(root)
    assert "\n" not in str(caught.value)


def test_splits_must_have_the_same_classes(tmp_path: Path) -> None:
    root = split_root(tmp_path, "train", "val")
    for path in (root / "val" / "red").iterdir():
        path.unlink()
    with pytest.raises(DatasetError, match=r"val/red: the class has no pictures"):
        find_pictures(root)
    (root / "val" / "red").rmdir()
    with pytest.raises(
        DatasetError,
        match="val: its classes differ from those of train/: 'red' only in train/; give all",
    ):
        find_pictures(root)
    write_class(root / "val" / "Red", "red", 1)
    with pytest.raises(DatasetError, match="'red' only in train/, 'Red' only in val/"):
        find_pictures(root)


def test_wrapped_classes_are_not_one_class(tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    write_folder(outer / "pets", 1)

    with pytest.raises(DatasetError, match=r"if its folders are the classes: --data \S+/pets$"):
        find_pictures(outer, least_classes=1)
