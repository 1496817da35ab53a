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
    COMMON,
    LOADING,
    environment,
    output_of,
    start_python,
    start_python_async,
)

REPOSITORY = Path(__file__).resolve().parents[2]
# Names of `subprocess` that start nothing; all others do.
HARMLESS = {
    "PIPE",
    "DEVNULL",
    "STDOUT",
    "TimeoutExpired",
    "SubprocessError",
    "CalledProcessError",
    "CompletedProcess",
}
OF_OS = (
    "os.fork",
    "os.system",
    "os.popen",
    "os.exec",
    "os.spawn",
    "os.posix_spawn",
    "os.startfile",
)
OF_LOOPS = (
    "create_subprocess_exec",
    "create_subprocess_shell",
    "subprocess_exec",
    "subprocess_shell",
)

# The helper itself, and the supervisor, whose children are the service.
ALLOWED = {"service/children.py", "service/extensions/cluster/processes.py"}


def starts(tree: ast.AST) -> set[str]:
    """Return the qualified names that start a process in a module, however they were imported."""
    imported: dict[str, str] = {}
    used = set()
    of_types = {node.value for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {
                alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names
            }
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
            imported |= names
            used |= set(names.values())
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            used |= {
                each.value
                for each in node.args
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in of_types:
            owner, _, rest = ast.unparse(node).partition(".")
            used.add(f"{imported.get(owner, owner)}.{rest}")
    return {name for name in used if starts_a_process(name)}


def starts_a_process(name: str) -> bool:
    module, _, rest = name.partition(".")
    if module == "subprocess":
        return rest.split(".")[0] not in HARMLESS | {""}
    if name.startswith(OF_OS) or name.endswith(OF_LOOPS) or module == "pty":
        return True
    return "multiprocessing" in name.split(".") or name.endswith("ProcessPoolExecutor")


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
def test_every_way_to_start_a_process_is_seen(code: str) -> None:
    assert starts(ast.parse(code))


def test_types_and_constants_start_no_process() -> None:
    code = (
        "import subprocess, os\nchild: subprocess.Popen[bytes]\nsubprocess.PIPE\nos.path.join('a')"
    )
    assert not starts(ast.parse(code))


def test_one_helper_starts_every_process() -> None:
    found = set()
    for package in ("service", "model", "vitserve"):
        for path in (REPOSITORY / package).rglob("*.py"):
            if starts(ast.parse(path.read_text())):
                found.add(path.relative_to(REPOSITORY).as_posix())
    assert found == ALLOWED


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


def test_a_child_imports_nothing_of_the_folder(hostile_folder: Path) -> None:
    with start_python("model.linear_probe", stdout=subprocess.DEVNULL) as child:
        assert child.wait(60) == 0

    async def fit() -> int:
        process = await start_python_async("service.extensions.teach.fit", str(hostile_folder))
        return await process.wait()

    asyncio.run(fit())
    assert not (hostile_folder / "trace").exists()


def test_a_child_sees_no_secrets(hostile_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "for the hub")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    of_program = output_of("env", timeout_seconds=60).splitlines()
    assert "OMP_NUM_THREADS=1" in of_program
    assert not [line for line in of_program if "secret" in line or "HF_TOKEN" in line]
    assert environment(LOADING)["HF_TOKEN"] == "for the hub"
    assert "secret" not in environment((*COMMON, *LOADING)).values()


def test_a_child_runs_in_the_root_folder() -> None:
    assert children.output_of("pwd", timeout_seconds=60) == "/\n"


def test_a_child_finds_the_packages_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr("sys.path", [str(REPOSITORY), *__import__("sys").path])
    code = start_python("model.linear_probe", stdout=subprocess.DEVNULL)
    assert code.wait(60) == 0
