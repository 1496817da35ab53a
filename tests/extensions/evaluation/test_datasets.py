import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from model.errors import DatasetError
from model.extensions.datasets import pictures
from model.extensions.datasets.folders import find_pictures
from model.extensions.datasets.pictures import PictureFiles, decode
from model.extensions.evaluation import cifar10
from model.extensions.evaluation.cifar10 import TEST_FILES, TRAIN_FILES, read, read_labels
from model.extensions.evaluation.datasets import Dataset, open_dataset, stratify
from model.images.preprocess import preprocess
from tests.extensions.datasets.picture_folders import write_class, write_folder
from tests.extensions.training.synthetic import LABELS
from tests.model.images.pictures import config

CONFIG = config((16, 24), (18, 27))


def files_of(counts: list[int], seed: int) -> PictureFiles:
    labels = np.repeat(np.arange(len(counts)), counts)
    np.random.default_rng(seed).shuffle(labels)
    return PictureFiles(labels, lambda number: bytes([number]), str)


@given(
    st.lists(st.integers(2, 60), min_size=2, max_size=12),
    st.floats(0.001, 0.999),
    st.integers(0, 1000),
)
def test_stratified_splits_lose_no_picture(counts: list[int], validation: float, seed: int) -> None:
    files = files_of(counts, seed)
    names = [str(index) for index in range(len(counts))]
    kept, aside = stratify(files, names, validation, seed)
    numbers = [int(part.name(number)) for part in (kept, aside) for number in range(len(part))]
    assert sorted(numbers) == list(range(len(files)))
    assert files.labels[numbers].tolist() == [*kept.labels, *aside.labels]
    for index, count in enumerate(counts):
        expected = min(max(validation * count, 1), count - 1)
        assert (aside.labels == index).sum() == pytest.approx(expected, abs=0.5 + 1e-6)
    again = stratify(
        files, names, min(max(round(validation * len(files)), 1), len(files) - 1), seed
    )
    assert len(again[0]) + len(again[1]) == len(files)


def test_impossible_splits_are_refused() -> None:
    remedy = "class 'b' has 1 picture: .* validate on: add pictures, or remove its folder"
    with pytest.raises(DatasetError, match=remedy):
        stratify(files_of([4, 1], 0), ("a", "b"), 0.5, 0)
    with pytest.raises(DatasetError, match="class 'b' has no pictures"):
        stratify(files_of([4], 0), ("a", "b"), 0.5, 0)
    for count in (0, 8, 9):
        with pytest.raises(DatasetError, match=f"cannot set {count} of 8 pictures aside"):
            stratify(files_of([4, 4], 0), ("a", "b"), count, 0)


def test_cifar_pictures_are_read_as_uploads(cifar: Path, tmp_path: Path) -> None:
    dataset = open_dataset(cifar, 80, 0)
    assert dataset.test is not None
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (
        320,
        80,
        100,
    )
    parts = [
        decode(files, config((32, 32)), tmp_path) for files in (dataset.train, dataset.validation)
    ]
    both = np.concatenate([part.pixels for part in parts]).reshape(400, -1)
    assert sorted(map(bytes, both)) == sorted(
        map(bytes, cifar10.read(cifar, cifar10.TRAIN_FILES).pixels.reshape(400, -1))
    )
    large = decode(dataset.train, config((48, 48)), tmp_path)
    resized = Image.fromarray(parts[0].pixels[7].transpose(1, 2, 0)).resize(
        (48, 48), Image.Resampling.BICUBIC
    )
    np.testing.assert_array_equal(large.pixels[7].transpose(1, 2, 0), np.asarray(resized))
    assert large.labels.tolist() == parts[0].labels.tolist()


def names_by_set(dataset: Dataset) -> dict[str, list[str]]:
    return {
        name: [files.name(number) for number in range(len(files))]
        for name, files in dataset.sets().items()
    }


def test_a_split_folder_keeps_its_split(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data", 10)
    split = names_by_set(open_dataset(root, 0.2, 0))
    assert {name: len(files) for name, files in split.items()} == {"train": 24, "validation": 6}
    assert [Path(file).parent.name for file in split["validation"]] == ["blue"] * 2 + [
        "green"
    ] * 2 + ["red"] * 2
    assert len({*split["train"], *split["validation"]}) == 30
    assert names_by_set(open_dataset(root, 0.2, 1)) != split
    for seed, (name, count) in enumerate({"train": 5, "val": 3, "test": 2}.items()):
        write_folder(tmp_path / "given" / name, count, seed=seed)
    dataset = open_dataset(tmp_path / "given", 5000, 0)
    assert dataset.own_validation
    assert [len(files) for files in dataset.sets().values()] == [15, 9, 6]


@pytest.mark.parametrize("memory", [0, 1 << 30], ids=["from a file", "in memory"])
def test_pictures_are_those_the_service_sees(
    tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MEMORY", memory)
    root = write_folder(tmp_path / "data", 4)
    write_class(root / "red", "red", 2, seed=1, suffix=".jpg")
    Image.new("LA", (40, 30), (90, 10)).save(root / "blue" / "grey.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.effect_noise((50, 30), 60).convert("RGB").save(root / "blue" / "turned.jpg", exif=turned)
    files = find_pictures(root).sets["train"]
    images = decode(files, CONFIG, tmp_path)
    assert images.pixels.shape == (len(files), 3, 16, 24)
    for number, pixels in enumerate(images.pixels):
        np.testing.assert_array_equal(
            pixels.transpose(1, 2, 0), preprocess(files.read(number), CONFIG)
        )
    assert isinstance(images.pixels, np.memmap) == (memory == 0)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_all_bad_files_are_told_at_once(
    tmp_path: Path,
) -> None:
    root = write_folder(tmp_path / "data", 4)
    good = (root / "red" / "000.png").read_bytes()
    (root / "red" / "notes.txt").write_text("not a picture")
    (root / "red" / "empty.png").touch()
    (root / "green" / "cut.png").write_bytes(good[: len(good) // 2])
    (root / "green" / "gone.png").symlink_to(root / "nowhere.png")
    (root / "green" / "loop").symlink_to(root)
    os.mkfifo(root / "blue" / "pipe.png")  # the file is not read
    with pytest.raises(DatasetError) as caught:
        decode(find_pictures(root).sets["train"], CONFIG, tmp_path)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("5 files in class folders cannot be read as pictures: repair, or move")
    named = dict(line.strip().split(": ", 1) for line in rest)
    assert list(named) == [
        str(root / name)
        for name in (
            "green/cut.png",
            "green/gone.png",
            "green/loop",
            "red/empty.png",
            "red/notes.txt",
        )
    ]
    assert named[str(root / "green/gone.png")] == "No such file or directory"
    for number in range(30):
        (root / "red" / f"bad{number}.png").write_bytes(b"x")
    with pytest.raises(DatasetError, match=r"35 files(.*\n){21}  and 15 more$"):
        decode(find_pictures(root).sets["train"], CONFIG, tmp_path)


def write_record(path: Path, label: int, pixels: np.ndarray) -> None:
    path.write_bytes(bytes([label]) + pixels.astype(np.uint8).tobytes())


def test_a_cifar_record_is_read_by_planes(cifar: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (3, 32, 32))
    write_record(cifar / "test_batch.bin", 7, pixels)
    images = read(cifar, TEST_FILES)
    assert images.labels.tolist() == [7]
    assert images.pixels.dtype == np.uint8
    np.testing.assert_array_equal(images.pixels[0], pixels)
    assert read_labels(cifar) == LABELS


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda _: b"", lambda data: data + b"\x00"]
)
def test_a_file_of_the_wrong_length_is_named(cifar: Path, damage: Callable[[bytes], bytes]) -> None:
    path = cifar / "data_batch_3.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DatasetError, match=r"data_batch_3\.bin.*3073"):
        read(cifar, TRAIN_FILES)


def test_bad_cifar_files_are_named(cifar: Path) -> None:
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
