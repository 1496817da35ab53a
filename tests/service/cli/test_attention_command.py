"""`vitserve attention`, run as a user runs it: in-process on a checkpoint made here."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.service.cli.command_line import run, write_checkpoint, write_pictures

pytestmark = pytest.mark.timeout(90)  # checkpoints are loaded, and answer

LABELS = ("tabby, tabby cat", "tiger", "crane", "crane")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), LABELS)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "pictures", "b.png", "a.jpg", "deep/a.webp")


def size_of(file: Path) -> tuple[int, int]:
    with Image.open(file) as picture:
        picture.load()
        return picture.size


def test_a_folder_of_maps_and_a_sheet_of_all(
    checkpoint: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maps, sheet = tmp_path / "maps", tmp_path / "sheet.png"
    code, out, _ = run(capsys, "attention", pictures, "-o", maps, "--sheet", sheet, "--checkpoint", checkpoint)
    assert code == 0
    assert sorted(file.name for file in maps.iterdir()) == ["a-2.heat.png", "a.heat.png", "b.heat.png"]
    assert {size_of(file) for file in maps.iterdir()} == {(384, 312)}, "the whole photo, and a caption below"
    assert size_of(sheet)[0] > 384
    assert len(out.splitlines()) == 3
    assert all(", relevance, evidence 1.00" in line for line in out.splitlines())


def test_classes_stand_beside_the_picture(
    checkpoint: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["attention", pictures / "b.png", "--checkpoint", checkpoint, "--class", "tabby", "--class", "1"]
    code, out, _ = run(capsys, *common, "-o", tmp_path / "x.png", "--side-by-side", "--method", "gae")
    assert code == 0
    assert all(f"{label} (" in out for label in ("tabby, tabby cat", "tiger"))
    assert out.count(", gae, evidence ") == 2
    assert size_of(tmp_path / "x.png")[0] == 3 * 384 + 2 * 4
    before = set(tmp_path.rglob("*"))
    sheet = tmp_path / "sheet.png"
    assert run(capsys, *common, "--sheet", sheet)[0] == 0
    assert set(tmp_path.rglob("*")) - before == {sheet}, "a sheet alone needs no folder"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "magic"], "method 'magic': expected one of relevance, cls, "),
        (["--class", "lion"], "class 'lion' is unknown"),
        (["--class", "crane"], "ambiguous: 2, 3 are called that"),
        (["--class", "4"], "an index below 4"),
        (["--class", "1", "--method", "rollout"], "class does not apply to method 'rollout'"),
    ],
)
def test_what_the_model_does_not_offer_is_one_line(
    flags: list[str],
    message: str,
    checkpoint: Path,
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = ["attention", pictures / "b.png", "-o", tmp_path / "x.png", "--checkpoint", checkpoint]
    code, _, err = run(capsys, *common, *flags)
    assert code == 1
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_bad_file_is_reported_and_the_others_are_drawn(
    checkpoint: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "bad.png").write_bytes(b"no picture")
    maps, sheet = tmp_path / "maps", tmp_path / "sheet.png"
    asked = ["attention", pictures, "-o", maps, "--sheet", sheet, "--checkpoint", checkpoint, "--method", "cls"]
    code, out, err = run(capsys, *asked)
    assert code == 1
    assert "bad.png: not a picture" in err
    assert len(list(maps.iterdir())) == 3
    assert all(line.endswith(": cls") for line in out.splitlines())
    assert size_of(sheet)[0] > 320
