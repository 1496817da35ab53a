"""Commands of several extensions: inspect, convert, evaluate and calibrate."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from model.checkpoint import load_checkpoint
from service.cli.main import main
from tests.service.cli.command_line import run, write_checkpoint

pytestmark = pytest.mark.timeout(120)  # some commands import torch


def test_inspect_prints_what_was_understood(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "inspect", checkpoint)
    assert code == 0
    for expected in ("tiny", "16x16", "bird, flying", "shortest_edge", "width=16"):
        assert expected in out


def test_converted_folder_answers_the_same(
    checkpoint: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "convert", checkpoint, "-o", tmp_path / "my converted")
    folder = f"{tmp_path}/my converted"
    line = f"{folder}: tiny; serve it with: vitserve serve --checkpoint '{folder}'"
    assert (code, out.splitlines()) == (0, [line])
    assert run(capsys, "convert", checkpoint, "-o", tmp_path / "converted")[0] == 0
    arguments = ["classify", pictures, "--json", "--dtype", "float32", "--checkpoint"]
    assert (
        run(capsys, *arguments, tmp_path / "converted")[1] == run(capsys, *arguments, checkpoint)[1]
    )
    code, _, err = run(capsys, "convert", checkpoint, "-o", tmp_path / "converted")
    assert code == 1
    assert "not an empty folder" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            ["calibrate", "bundled", "photos/"],
            "required: --data; for example: vitserve calibrate runs/mine --data",
        ),
        (
            ["evaluate", "photos/"],
            "--data --unknown is required; for example: vitserve evaluate --data photos/",
        ),
        (["inspect", "a", "b"], "unexpected argument 'b'"),
        (
            ["inspect", "bundled", "--checkpoint", "mine"],
            "--checkpoint is given twice with different values: give one",
        ),
    ],
)
def test_a_wrong_call_says_what_was_meant(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(line)
    assert stopped.value.code == 2
    [shown] = capsys.readouterr().err.splitlines()
    assert message in shown


def test_a_checkpoint_is_argument_or_flag(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = run(capsys, "inspect", checkpoint)
    assert told[0] == 0
    assert run(capsys, "inspect", "--checkpoint", checkpoint) == told
    assert run(capsys, "convert", "--checkpoint", checkpoint, "--out", tmp_path / "flag")[0] == 0
    assert run(capsys, "convert", "-o", tmp_path / "argument", checkpoint)[0] == 0
    _, _, err = run(capsys, "convert", "-o", tmp_path / "none")
    assert err == (
        "vitserve: the checkpoint is missing: vitserve convert CHECKPOINT, "
        "such as convert bundled\n"
    )
    monkeypatch.setenv("VIT_CHECKPOINT", str(checkpoint))
    assert run(capsys, "inspect") == told


def test_headless_checkpoint_stays_headless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    headless = write_checkpoint(tmp_path / "headless", ())
    code, out, _ = run(capsys, "inspect", headless)
    assert (code, "no classification head" in out) == (0, True)
    code, out, err = run(capsys, "convert", headless, "-o", tmp_path / "again")
    assert (code, err) == (0, "")
    assert load_checkpoint(str(tmp_path / "again")).config.num_classes == 0


def test_files_are_utf8_in_any_locale(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "in", ("猫", "собака"))
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [
        sys.executable,
        "-m",
        "vitserve",
        "convert",
        str(checkpoint),
        "-o",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, env=plain, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert load_checkpoint(str(tmp_path / "out")).labels == ("猫", "собака")
