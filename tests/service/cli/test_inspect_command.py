"""`vitserve inspect` with figures, as a user runs it."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from tests.service.cli.command_line import run, write_checkpoint, write_pictures

pytestmark = pytest.mark.timeout(90)  # checkpoints are loaded, and answer


def write(folder: Path, **changes: object) -> Path:
    return write_checkpoint(folder, "ab", resize="squash", image_size=(16, 24), depth=3, **changes)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "pictures", "1.png", "deep/2.jpg", "deep/3.webp")


def test_figures_and_numbers_are_written(tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "figures"
    code, told, _ = run(capsys, "inspect", write(tmp_path / "m"), "--figures", out, "--images", pictures)
    assert code == 0
    assert "3 pictures" in told
    assert sorted(file.name for file in out.iterdir()) == ["attention_distance.csv", "attention_distance.png"]
    assert (out / "attention_distance.png").read_bytes().startswith(b"\x89PNG")
    with (out / "attention_distance.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["layer"], row["head"]) for row in rows] == [(f"{n // 2}", f"{n % 2}") for n in range(6)]
    assert all(0 < float(row["distance_px"]) < np.hypot(8, 16) for row in rows)


def test_a_picture_that_cannot_be_read_is_named_and_left_out(
    tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write(tmp_path / "m")
    run(capsys, "inspect", checkpoint, "--figures", tmp_path / "good", "--images", pictures)
    (pictures / "0.png").write_bytes((pictures / "1.png").read_bytes()[:100])
    code, told, err = run(capsys, "inspect", checkpoint, "--figures", tmp_path / "bad", "--images", pictures)
    assert code == 1
    assert "0.png: left out" in err
    assert "3 pictures" in told
    numbers = [(tmp_path / name / "attention_distance.csv").read_text() for name in ("good", "bad")]
    assert numbers[0] == numbers[1]


def test_what_cannot_be_drawn_is_one_line(
    tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    checkpoint = write(tmp_path / "m")
    for flags, message in (
        (["--images", pictures], "--figures DIR and --images FOLDER need each other"),
        (["--figures", tmp_path / "out", "--images", tmp_path / "m"], "no pictures in this folder"),
        (["--figures", tmp_path / "file", "--images", pictures], "file: cannot be written"),
    ):
        code, _, err = run(capsys, "inspect", checkpoint, *flags)
        assert (code, err.count("\n"), message in err) == (1, 1, True)
    monkeypatch.setattr("model.insight.figures.find_spec", lambda name: None)
    code, _, err = run(capsys, "inspect", checkpoint, "--figures", tmp_path / "out", "--images", pictures)
    assert (code, "pip install 'vitserve[figures]'" in err) == (1, True)
