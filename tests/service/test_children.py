"""Child processes see no secrets and import nothing from the folder that the service was started
in.
"""

import ast
import asyncio
import subprocess
from pathlib import Path

import pytest

from service import children
from service.children import (
    output_of,
    start_python,
    start_python_async,
)
from tests.service.process_starts import REPOSITORY, files_that_start_processes, starts


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess\nsubprocess.run(['ls'])",
        "import subprocess as sp\nsp.Popen(['ls'])",
        "from subprocess import Popen",
        "from subprocess import check_output as read",
        "import subprocess\nstart = subprocess.call",
        "import importlib\nimportlib.import_module('pty')",
        "import os\nos.execv('/bin/ls', [])",
        "from os import execv",
        "import os as system\nsystem.posix_spawn('/bin/ls', [], {})",
        "import pty\npty.spawn('/bin/ls')",
        "import asyncio\nasyncio.subprocess.create_subprocess_exec('ls')",
        "from asyncio import create_subprocess_shell",
        "loop.subprocess_exec(factory, 'ls')",
        "import torch.multiprocessing as mp",
        "from concurrent.futures import ProcessPoolExecutor",
        "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
    ],
)
def test_every_process_start_is_seen(code: str) -> None:
    assert starts(ast.parse(code))


def test_types_start_no_process() -> None:
    code = (
        "import subprocess, os\nchild: subprocess.Popen[bytes]\nsubprocess.PIPE\nos.path.join('a')"
    )
    assert not starts(ast.parse(code))


def test_one_helper_starts_every_process() -> None:
    starters = files_that_start_processes("service", "model", "vitserve")
    core = {file for file in starters if "/extensions/" not in file}
    assert core == {"service/children.py"}


@pytest.fixture
def hostile_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module that leaves a trace if it is imported."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("numpy", "json", "sitecustomize"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", ["", ".", str(folder), *__import__("sys").path])
    monkeypatch.setenv("VIT_ADMIN_KEY", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return tmp_path


def test_a_child_ignores_its_folders_files(hostile_folder: Path) -> None:
    with start_python("model.calibration", stdout=subprocess.DEVNULL) as child:
        assert child.wait(60) == 0

    async def begin() -> int:
        process = await start_python_async("model.calibration", stdout=subprocess.DEVNULL)
        return await process.wait()

    assert asyncio.run(begin()) == 0
    assert not (hostile_folder / "trace").exists()


def test_a_child_sees_no_secrets(hostile_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "for the hub")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    of_program = output_of("env", timeout_seconds=60).splitlines()
    assert "OMP_NUM_THREADS=1" in of_program
    assert not [line for line in of_program if "secret" in line or "HF_TOKEN" in line]


def test_a_child_runs_in_the_root_folder() -> None:
    assert children.output_of("pwd", timeout_seconds=60) == "/\n"


def test_a_child_finds_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr("sys.path", [str(REPOSITORY), *__import__("sys").path])
    code = start_python("model.calibration", stdout=subprocess.DEVNULL)
    assert code.wait(60) == 0
