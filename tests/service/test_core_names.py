"""The core names no extension, so that any can be added or removed without changing it."""

import re
from pathlib import Path

from tests.conftest import REPOSITORY

NAMES = re.compile(
    r"teach(?!er|able)|/heads\b|/v2\b|torchserve|sagemaker|redis|\bray\b|opentelemetry|grpc",
    re.IGNORECASE,
)
TEXTS = {".py", ".js", ".html", ".css"}

ALLOWED = {
    # A user's file of another product is recognised by its name.
    "model/checkpoint/tensor_files.py": {"torchserve"},
}


def core() -> list[Path]:
    """Return the source files of the core."""
    files = [
        path.relative_to(REPOSITORY)
        for package in ("model", "service")
        for path in (REPOSITORY / package).rglob("*")
        if path.suffix in TEXTS
    ]
    return [path for path in files if not {"extensions", "static"}.intersection(path.parts)]


def test_the_core_names_no_extension() -> None:
    for path in core():
        names = {name.lower() for name in NAMES.findall((REPOSITORY / path).read_text())}
        assert names <= ALLOWED.get(path.as_posix(), set()), path
