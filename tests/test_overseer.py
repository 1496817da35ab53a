"""A run of tests ends by itself, whatever became of the processes that run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

CONFTEST = """
import pathlib, threading, time
from tests.overseer import Overseer
from xdist.workermanage import NodeManager

NodeManager.EXIT_TIMEOUT = 0.1  # for those that do not end when they are told

class WhenAllHaveBegun(threading.Timer):
    def run(self):
        while not self.finished.wait(0.02):
            if len(list(pathlib.Path().glob("begun-*"))) == 3:
                time.sleep(0.5)
                return self.function()

def pytest_runtest_call(item):
    pathlib.Path("begun-" + item.name).touch()

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Overseer(*((1, WhenAllHaveBegun) if {hangs} else (50,))))
"""


def run(folder: Path, test: str, *, hangs: bool) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.format(hangs=hangs))
    (folder / "pytest.ini").write_text("[pytest]")
    (folder / "test_it.py").write_text(f"import os, time\n{test}def test_another(): pass\ndef test_last(): pass\n")
    [dist] = re.findall("--dist [a-z]+", (REPOSITORY / "Makefile").read_text())
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:schemathesis",
        "-n",
        "2",
        *dist.split(),
    ]
    return subprocess.run(
        command,
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.timeout(90)
def test_a_process_that_ends_fails_its_test_alone_and_its_exit_code_is_shown(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_it():\n    time.sleep(1)\n    os._exit(7)\n", hangs=False)
    assert done.returncode == 1
    assert "crashed while running 'test_it.py::test_it'" in done.stdout
    assert " ended with 7\n" in done.stdout
    assert "1 failed, 2 passed" in done.stdout


@pytest.mark.timeout(90)
def test_a_run_that_hangs_ends_and_names_the_test(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_it():\n    time.sleep(1000)\n", hangs=True)
    assert done.returncode == 2
    assert "s: test_it.py::test_it\n" in done.stdout
