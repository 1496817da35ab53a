"""What the command line imports before it runs a subcommand, and how the subcommand is found."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import service.cli
from service.cli.main import COMMANDS, main
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.timeout(120)  # processes start, each of which imports torch

HEAVY = {"fastapi", "starlette", "uvicorn", "httpx", "pydantic", "numpy", "PIL", "torch", "prometheus_client"}

LIST_MODULES = """
import sys
from service.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(*sys.modules, file=sys.stderr)
"""


def imported_by(*arguments: str) -> set[str]:
    """The modules that a new interpreter has imported after this command line."""
    command = [sys.executable, "-c", LIST_MODULES, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout
    return set(done.stderr.split())


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_import_no_library_and_no_subcommand(flag: str) -> None:
    modules = imported_by(flag)
    assert not modules & HEAVY
    assert {name for name in modules if name.startswith("service.cli.")} == {"service.cli.main"}


@pytest.mark.parametrize("name", ["serve", "classify", "train"])
def test_a_subcommand_imports_no_other_and_shows_its_flags_without_torch(name: str) -> None:
    modules = imported_by(name, "--help")
    assert {other for other in COMMANDS if f"service.cli.{other}" in modules} == {name}
    assert "torch" not in modules
    assert not modules & {"fastapi", "uvicorn"}  # which are imported while graphs are compiled


def test_every_subcommand_is_in_the_table() -> None:
    modules = {found.name for found in pkgutil.iter_modules(service.cli.__path__)}
    assert {name for name in modules if hasattr(importlib.import_module(f"service.cli.{name}"), "run")} == set(COMMANDS)


@pytest.mark.parametrize(
    ("line", "near"),
    [
        (["--prot", "9000"], "--port"),
        (["serve", "--queu-size=3"], "--queue-size"),
        (["classify", "--tok", "3"], "--top-k"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest_and_no_usage(
    line: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(line)
    assert stopped.value.code == 2
    [message] = capsys.readouterr().err.splitlines()
    assert f": did you mean {near}?" in message


def test_flags_alone_are_those_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "http"]) == 1
    assert capsys.readouterr().err.startswith("vitserve: VIT_PORT='http': ")
