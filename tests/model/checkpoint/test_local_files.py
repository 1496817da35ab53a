"""Only regular files inside the folder that was named are read; what may not be read is said with the way out."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint import load_checkpoint, native
from model.checkpoint.checkpoint import Checkpoint
from tests.model.checkpoint.folders import CONFIG, FOLDERS, PREPROCESS, native_folder, refusal, tiny

PARTS = [
    ("native", "config.json"),
    ("native", "model.safetensors"),
    ("huggingface", "preprocessor_config.json"),
]
NOBODY = 65534


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(path))


@pytest.mark.timeout(30)  # who reads a pipe waits for ever
@pytest.mark.parametrize(("kind", "name"), PARTS)
@pytest.mark.parametrize(
    ("put", "said"),
    [
        (os.mkfifo, "a device, pipe or socket, expected a regular file"),
        (unix_socket, "a device, pipe or socket, expected a regular file"),
        (Path.mkdir, "a folder, expected a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "a symbolic link out of its folder: put the file itself there"),
        (lambda path: path.symlink_to("/etc/hostname"), "a symbolic link out of its folder: put the file itself there"),
    ],
)
def test_a_part_that_is_no_regular_file_of_its_folder_is_refused(
    kind: str, name: str, put: Callable[[Path], None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = FOLDERS[kind](tmp_path / "model")
    monkeypatch.chdir(folder)  # the path of a socket is short
    (folder / name).unlink()
    put(Path(name))
    assert refusal(folder) == f"{folder / name}: {said}"


def test_links_within_a_folder_are_followed_as_kubernetes_makes_them(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    native_folder(mount / "..2026_11_22")
    (mount / "..data").symlink_to("..2026_11_22")
    for name in ("config.json", "model.safetensors"):
        (mount / name).symlink_to(f"..data/{name}")
    assert load_checkpoint(str(mount)).build()
    assert load_checkpoint(str(mount / "..data")).build()


def test_a_snapshot_of_the_hubs_cache_is_read_with_its_blobs_alone(tmp_path: Path) -> None:
    cache = tmp_path / "models--owner--name"
    snapshot = native_folder(cache / "snapshots" / ("a" * 40))
    (cache / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).rename(cache / "blobs" / name[:5])
        (snapshot / name).symlink_to(f"../../blobs/{name[:5]}")
    assert load_checkpoint(str(snapshot)).build()
    (cache / "blobs" / "confi").rename(cache / "other")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../other")
    assert "a symbolic link out of its folder" in refusal(snapshot)
    moved = tmp_path / "name" / "snapshots" / "1"
    shutil.copytree(snapshot, moved, symlinks=True)
    shutil.copytree(cache / "blobs", tmp_path / "name" / "blobs")
    assert "a symbolic link out of its folder" in refusal(moved)


def test_nobody_learns_through_a_link_what_exists_outside(tmp_path: Path) -> None:
    folder = native_folder(tmp_path)
    said = []
    for target in ("/etc/hostname", "/no/such/file"):
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to(target)
        said.append(refusal(folder))
    assert said[0] == said[1]


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    folder = native_folder(tmp_path)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    assert "config.json: Too many levels of symbolic links" in refusal(folder)


@contextmanager
def nobody() -> Iterator[None]:
    """A user who owns nothing here."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_what_may_not_be_read_is_said() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own lets nobody enter
        Path(name).chmod(0o755)
        folder = native_folder(Path(name).resolve() / "model")
        for file in folder.iterdir():
            file.chmod(0o644)
        load_checkpoint(str(folder))  # what is imported for it may lie where nobody may look
        with nobody():
            assert load_checkpoint(str(folder)).build()
        for part in (folder / "config.json", folder / "model.safetensors", folder):
            mode = part.stat().st_mode
            part.chmod(0o600)
            with nobody():
                assert refusal(folder).endswith(": Permission denied")
            part.chmod(mode)


def test_content_tells_models_apart_that_have_one_name_and_stays_with_one_that_moves(tmp_path: Path) -> None:
    def content(change: dict[str, Any], folder: str) -> str:
        checkpoint = Checkpoint("a", "a", "vitserve", "a", CONFIG, PREPROCESS, ("a", "b", "c"), tiny())
        native.write(tmp_path / folder, replace(checkpoint, **change), dtype=torch.float32)
        (tmp_path / "served").unlink(missing_ok=True)
        (tmp_path / "served").symlink_to(tmp_path / folder)  # as releases are switched
        return load_checkpoint(str(tmp_path / "served")).content

    first = content({}, "first")
    assert re.fullmatch("[0-9a-f]{16}", first)
    assert content({}, "moved") == first
    changed = {name: tensor + (name == "head.bias") for name, tensor in tiny().items()}
    others = [content({"tensors": changed}, "weights"), content({"labels": ("a", "b", "d")}, "labels")]
    assert len({first, *others}) == 3
