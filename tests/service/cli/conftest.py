"""Fixtures: commands start fast, without compiled graphs."""

from pathlib import Path

import pytest

from tests.service.cli.command_line import write_checkpoint, write_pictures


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIT_COMPILE", "off")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), ("cat", "dog", "bird, flying"))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = write_pictures(tmp_path / "pictures", "b.PNG", "a.jpg", "deep/c.webp")
    (folder / "notes.txt").write_text("no picture")
    return folder
