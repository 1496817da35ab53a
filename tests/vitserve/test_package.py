"""The package that programs import to call the service, and the command of its name."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.timeout(60)  # processes start

SERVER_ONLY = {"fastapi", "model", "numpy", "PIL", "python_multipart", "service", "starlette", "torch", "uvicorn"}

FOREIGN = "raise SystemExit('this is not of vitserve')"


@pytest.fixture(params=["{}.py", "{}/__init__.py"], ids=["file", "package"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of somebody's own, with the names of the server's packages."""
    for name in ("service", "model"):
        file = tmp_path / request.param.format(name)
        file.parent.mkdir(exist_ok=True)
        file.write_text(FOREIGN)
    return tmp_path


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder that comes first wherever Python looks for modules."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_program_beside_files_of_any_name_imports_the_client_and_nothing_of_the_server(folder: Path) -> None:
    (folder / "program.py").write_text("import sys, vitserve.client; print(*sys.modules)")
    done = run_in(folder, "program.py")
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.split())
    assert "httpx" in modules
    assert not modules & SERVER_ONLY


def test_the_command_works_beside_files_of_any_name(folder: Path) -> None:
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["vitserve"].split(":")
    script = f"import sys; from {module} import {function}; sys.exit({function}())"
    for command in (["-c", script], ["-m", "vitserve"]):
        done = run_in(folder, *command, "attention", "--help")  # with the subcommand's modules
        assert "usage: vitserve attention" in done.stdout, done.stderr
