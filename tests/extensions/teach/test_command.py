"""`vitserve teach` makes a head of folders of pictures, as a file or in a running server."""

from pathlib import Path

import pytest

from model.extensions.taught.taught_heads import TaughtHead
from service.cli.main import main
from tests.extensions.datasets.picture_folders import COLOURS, write_folder
from tests.service.cli.command_line import run, write_checkpoint


def test_a_folder_becomes_the_file_of_a_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photos = write_folder(tmp_path / "photos", 6)
    (photos / "red" / "broken.png").write_bytes(b"no picture")
    (photos / "red" / "copy.png").write_bytes(next((photos / "red").glob("*")).read_bytes())
    checkpoint = write_checkpoint(tmp_path / "start", "abcde")
    before = (99).to_bytes(8, "little") + b'{"format": "vitserve-head"}'
    Path("colours.safetensors").write_bytes(before)
    Path("other name").hardlink_to("colours.safetensors")
    assert (
        main(["teach", "colours", str(photos), "--checkpoint", str(checkpoint), "--device", "cpu"])
        == 1
    )
    told = capsys.readouterr()
    assert "broken.png: not a picture" in told.err
    assert "files have no features" in told.err
    assert "accuracy on 18 held-out pictures" in told.out
    assert "colours.safetensors: replaces the head that it held; put it into a folder" in told.out
    head = TaughtHead.from_bytes((tmp_path / "colours.safetensors").read_bytes(), "colours").head
    assert head.labels == tuple(sorted(COLOURS))
    assert main(["inspect", "colours.safetensors"]) == 1
    assert (
        "colours.safetensors: a taught head: a folder of --models takes it"
        in capsys.readouterr().err
    )
    assert Path("other name").read_bytes() == before, (
        "whoever reads the file meanwhile has all of it"
    )


def test_only_the_train_split_is_taught(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, (name, count) in enumerate({"seg_train": 4, "seg_test": 3}.items()):
        write_folder(tmp_path / "photos" / name, count, seed=seed)
    checkpoint = write_checkpoint(tmp_path / "start", "abcde")
    code, out, err = run(
        capsys, "teach", "colours", "photos", "--checkpoint", checkpoint, "--device", "cpu"
    )
    assert (code, "accuracy on 12 held-out pictures" in out) == (0, True)
    assert "vitserve: photos: seg_train/ is used to teach; seg_test/ not used\n" in err
    (tmp_path / "photos" / "seg_train").rename(tmp_path / "photos" / "seg_val")
    code, _, err = run(capsys, "teach", "colours", "photos", "--checkpoint", checkpoint)
    assert (code, "no train split to teach" in err) == (1, True)
    assert "name it: vitserve teach colours photos/seg_val\n" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a/b", "."], "'a/b': a model's name has 1 to 128"),
        (["pets.safetensors", "."], "pets.safetensors: a file; give the head's name, pets"),
        ([".pets", "."], ".pets: a folder of --models skips hidden files; leave out the dot"),
        (["pets", "nowhere"], "nowhere: no such folder"),
        ([".", "pets"], ".: a folder; the name of the head comes first: vitserve teach pets ."),
        (["pets", "."], ".: no pictures: expected one folder of them for each class"),
    ],
)
def test_failed_teaching_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["teach", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_weights_of_the_same_name_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = tmp_path / "pets.safetensors"
    weights.write_bytes(b"weights of a network")
    (tmp_path / "pictures/cat").mkdir(parents=True)
    assert main(["teach", "pets", "pictures"]) == 1
    assert "pets.safetensors: exists and is not a taught head" in capsys.readouterr().err
    assert weights.read_bytes() == b"weights of a network"


@pytest.mark.parametrize("options", [[], ["--url", "http://127.0.0.1:9"]], ids=["here", "server"])
def test_a_folder_name_must_be_a_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    photos = write_folder(tmp_path / "photos", 2)
    (photos / "red").rename(photos / "a\ufffdb")
    assert main(["teach", "pets", str(photos), *options]) == 1
    assert r"photos: the name 'a\ufffdb' has characters that cannot" in capsys.readouterr().err


def test_a_picture_of_two_labels_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = write_folder(tmp_path / "photos", 2)
    picture = next((photos / "red").iterdir())
    (photos / "blue" / "copy.png").write_bytes(picture.read_bytes())
    assert main(["teach", "pets", str(photos), "--url", "http://127.0.0.1:9"]) == 1
    assert "photos: 1 pictures have two labels, such as: " in capsys.readouterr().err
