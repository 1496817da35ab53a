"""`make` installs the packages that it names, from the index that it is given."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = """#!/bin/sh
echo "$@" >>"$(dirname "$0")/calls"
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str, **environment: str) -> str:
    # Apart from a `make test` that these tests may run in, and from what it was given.
    surrounding = {name: value for name, value in os.environ.items() if name in {"PATH", "HOME"}}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, env=surrounding | environment, capture_output=True, text=True, check=True
    ).stdout


def install(folder: Path, *arguments: str, **environment: str) -> tuple[str, list[list[str]]]:
    """Let `make` set up `make run` in `folder` with a pip that installs nothing; return its output and pip's calls."""
    pip = folder / "bin" / "pip"
    pip.parent.mkdir(parents=True)
    pip.write_text(PIP)
    pip.chmod(0o755)
    (folder / ".made").touch()
    output = make(f"VENV={folder}", f"{folder}/.run", *arguments, **environment)
    return output, [shlex.split(line) for line in (pip.parent / "calls").read_text().splitlines()]


@pytest.mark.parametrize("given_in", ["arguments", "environment"])
def test_torch_alone_comes_from_the_index_that_is_named(tmp_path, given_in):
    if given_in == "arguments":
        output, calls = install(tmp_path, f"TORCH_INDEX_URL={CPU_INDEX}")
    else:
        output, calls = install(tmp_path, TORCH_INDEX_URL=CPU_INDEX)

    first, second = calls
    assert first[-3:] == ["--index-url", CPU_INDEX, "torch"]
    assert second[-2:] == ["-e", ".[openvino]"]
    assert "--index-url" not in second
    assert all(call[call.index("-c") + 1] == "constraints.txt" for call in calls)
    assert "NVIDIA" not in output
