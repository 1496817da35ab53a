from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from model.data.image_folder import Decoder, find_pictures
from model.data.labelled_images import PixelStorage
from model.errors import DatasetError
from model.images.preprocess import preprocess
from tests.model.data.configs import bicubic_config
from tests.model.data.picture_folders import COLOURS, write_class, write_folder

CONFIG = bicubic_config(16, 24, resize_size=(18, 27))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data", 4)


@pytest.mark.parametrize("memory", [0, 1 << 30], ids=["from a file", "in memory"])
def test_pictures_are_those_that_the_service_would_see(root: Path, tmp_path: Path, memory: int) -> None:
    write_class(root / "red", "red", 2, seed=1, suffix=".jpg")
    Image.new("LA", (40, 30), (90, 10)).save(root / "blue" / "grey.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.effect_noise((50, 30), 60).convert("RGB").save(root / "blue" / "turned.jpg", exif=turned)
    files = find_pictures(root).train
    images = Decoder(progress=False).decode(files, CONFIG, PixelStorage(tmp_path, memory))
    assert images.pixels.shape == (len(files), 3, 16, 24)
    for pixels, path in zip(images.pixels, files.paths, strict=True):
        np.testing.assert_array_equal(pixels.transpose(1, 2, 0), preprocess(path.read_bytes(), CONFIG))
    assert isinstance(images.pixels, np.memmap) == (memory == 0)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_all_bad_files_are_told_at_once_with_their_reasons(root: Path, tmp_path: Path) -> None:
    good = (root / "red" / "000.png").read_bytes()
    (root / "red" / "notes.txt").write_text("not a picture")
    (root / "red" / "empty.png").touch()
    (root / "green" / "cut.png").write_bytes(good[: len(good) // 2])
    (root / "green" / "gone.png").symlink_to(root / "nowhere.png")
    os.mkfifo(root / "blue" / "pipe.png")
    decoder = Decoder(progress=False)
    decoder.decode(find_pictures(root).train, CONFIG, PixelStorage(tmp_path))
    with pytest.raises(DatasetError) as caught:
        decoder.refuse_bad(root)
    first, *rest = str(caught.value).splitlines()
    assert first == f"{root}: 5 files in class folders cannot be read as pictures:"
    named = dict(line.strip().split(": ", 1) for line in rest)
    assert list(named) == [
        str(root / name)
        for name in ("blue/pipe.png", "green/cut.png", "green/gone.png", "red/empty.png", "red/notes.txt")
    ]
    assert all(named.values())
    assert named[str(root / "blue/pipe.png")] == "not a regular file"
    assert named[str(root / "green/gone.png")] == "No such file or directory"


def test_many_bad_files_are_counted(root: Path, tmp_path: Path) -> None:
    for number in range(33):
        (root / "red" / f"bad{number}.png").write_bytes(b"x")
    decoder = Decoder(progress=False)
    decoder.check(find_pictures(root).train, CONFIG)
    with pytest.raises(DatasetError) as caught:
        decoder.refuse_bad(root)
    lines = str(caught.value).splitlines()
    assert "33 files" in lines[0]
    assert len(lines) == 22
    assert lines[-1] == "  and 13 more"


def test_bad_files_can_be_left_out(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "blue" / "0.png").write_text("not a picture")
    (root / "red" / "zzz.png").write_text("not a picture")
    good = find_pictures(root).train
    decoder = Decoder(progress=False)
    images = decoder.decode(good, CONFIG, PixelStorage(tmp_path, 0))
    decoder.warn_of_bad(root)
    assert f"{root}: 2 files in class folders" in caplog.text
    assert f"  {root / 'red' / 'zzz.png'}: not a picture" in caplog.text
    paths = [path for path in good.paths if path.name not in ("0.png", "zzz.png")]
    assert images.pixels.shape[0] == len(images.labels) == len(paths) == 12
    for pixels, label, path in zip(images.pixels, images.labels, paths, strict=True):
        np.testing.assert_array_equal(pixels.transpose(1, 2, 0), preprocess(path.read_bytes(), CONFIG))
        assert sorted(COLOURS)[label] == path.parent.name


def test_good_files_are_not_complained_about(root: Path) -> None:
    decoder = Decoder(progress=False)
    decoder.check(find_pictures(root).train, CONFIG)
    decoder.refuse_bad(root)
    assert len(decoder.digests) == 12


def test_a_disk_that_is_too_small_is_said_before_anything_is_decoded_or_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_much = 10 * shutil.disk_usage(tmp_path).total
    # To reserve as much would take all that there is, if only for a moment.
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("the disk is filled"), raising=False)
    with pytest.raises(DatasetError, match=r"no room for .* GiB"):
        PixelStorage(tmp_path, 0).allocate((too_much,))


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no way to reserve room here")
def test_room_that_is_gone_when_it_is_reserved_is_said_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    with pytest.raises(DatasetError, match=r"no room for .* GiB"):
        PixelStorage(tmp_path, 0).allocate((100,))
