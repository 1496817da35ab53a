"""Which image files the subcommands find, and the one that the package brings."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

from service.cli.image_files import find_images
from tests.conftest import REPOSITORY


def test_the_example_is_inside_the_package_and_listed_as_its_data() -> None:
    example = REPOSITORY / "service/cli/example.jpg"
    assert example.read_bytes() == (REPOSITORY / "examples" / "dog.jpg").read_bytes()
    package_data = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert any(fnmatch("cli/example.jpg", pattern) for pattern in package_data["service"])


def test_files_keep_their_order_and_folders_are_sorted(tmp_path: Path) -> None:
    for name in ("b.PNG", "a.jpg", "deep/c.webp", "notes.txt"):
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "upload").touch()
    found = find_images([tmp_path / "upload", tmp_path / "folder"])
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "upload",
        "folder/a.jpg",
        "folder/b.PNG",
        "folder/deep/c.webp",
    ]
