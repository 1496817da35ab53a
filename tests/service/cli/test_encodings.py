"""Streams and files in an encoding that lacks characters of labels and file names."""

import io
import json
import os
import sys
from pathlib import Path

import pytest

from service.cli.main import main
from tests.needs import needs
from tests.service.cli.command_line import write_checkpoint, write_pictures

pytestmark = pytest.mark.timeout(120)  # processes start

LABELS = ("猫", "собака", "\N{PILE OF POO}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), LABELS)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "фото"
    for label in LABELS:
        write_pictures(folder / label, "雪.png", "two.png")
    return folder


def run(monkeypatch: pytest.MonkeyPatch, encoding: str, *arguments: object) -> tuple[int, str, str]:
    """Return the exit code and the output of a command with strict streams of an encoding."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", streams[0])
        patched.setattr(sys, "stderr", streams[1])
        code = main([str(argument) for argument in arguments])
        for stream in streams:
            stream.flush()
    out, err = (stream.buffer.getvalue().decode(encoding) for stream in streams)
    return code, out, err


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "ascii"])
@pytest.mark.parametrize(
    "command",
    [
        "classify PHOTOS",
        "classify PHOTOS --csv",
        pytest.param("evaluate --data PHOTOS", marks=needs("evaluation")),
        "attention PHOTOS -o OUT",
        "embed PHOTOS -o N",
    ],
)
def test_unknown_characters_are_replaced(
    command: str,
    encoding: str,
    checkpoint: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = {"PHOTOS": photos, "OUT": tmp_path / "карты", "N": tmp_path / "x.npy"}
    line = [str(paths.get(word, word)) for word in command.split()]
    code, out, _ = run(monkeypatch, encoding, *line, "--checkpoint", checkpoint)
    assert code == 0
    assert "?" in out or command.startswith("embed")
    code, _, err = run(monkeypatch, encoding, "classify", tmp_path / "雪.png")
    assert (code, "no such file" in err, err.count("\n")) == (1, True, 1)


def test_json_escapes_what_a_terminal_lacks(
    checkpoint: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = photos / LABELS[0] / "雪.png"
    shown = {}
    for encoding in ("cp1252", "utf-8"):
        _, out, _ = run(
            monkeypatch, encoding, "classify", picture, "--json", "--checkpoint", checkpoint
        )
        shown[encoding] = json.loads(out)
    assert shown["cp1252"] == shown["utf-8"]
    assert shown["utf-8"]["file"] == str(picture)


def test_undecodable_names_keep_their_bytes(
    checkpoint: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = os.fsdecode(os.fsencode(photos / "two") + b"\xff.png")
    (photos / LABELS[0] / "two.png").rename(odd)
    arguments = [odd, "--checkpoint", checkpoint]
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        assert main([str(each) for each in ["classify", *arguments]]) == 0
    stream.flush()
    assert os.fsencode(odd) in stream.buffer.getvalue()
    assert run(monkeypatch, "utf-8", "embed", *arguments, "-o", tmp_path / "x.npy")[0] == 0
    assert os.fsencode(odd) in (tmp_path / "x.csv").read_bytes()
