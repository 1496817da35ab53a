"""Child processes see no secrets and import nothing from the folder that the service was started in."""

import ast
import asyncio
import subprocess
from pathlib import Path

import pytest

from service import children
from service.children import COMMON, LOADING, environment, output_of, start_python, start_python_async

REPOSITORY = Path(__file__).resolve().parents[2]
STARTS = {"Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"}
OF_OS = {"fork", "forkpty", "system", "popen", "posix_spawn", "posix_spawnp", "startfile"}
OF_ASYNCIO = {"create_subprocess_exec", "create_subprocess_shell"}

# The helper itself, and the supervisor, whose children are the service.
ALLOWED = {"service/children.py", "service/cluster/processes.py"}


def starts_a_process(node: ast.AST) -> bool:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = {alias.name.split(".")[0] for alias in node.names}
        module = (getattr(node, "module", None) or "").split(".")[0]
        return "multiprocessing" in names | {module}
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return isinstance(node, ast.Name) and node.id in OF_ASYNCIO
    owner, name = node.value.id, node.attr
    if owner == "os":
        return name in OF_OS or name.startswith(("exec", "spawn"))
    return (owner == "subprocess" and name in STARTS) or name in OF_ASYNCIO


def test_one_helper_starts_every_process() -> None:
    found = set()
    for package in ("service", "model", "vitserve"):
        for path in (REPOSITORY / package).rglob("*.py"):
            of_type_only = [node for node in ast.walk(ast.parse(path.read_text())) if starts_a_process(node)]
            names = {ast.unparse(node) for node in of_type_only} - {"subprocess.Popen[Any]"}
            if names:
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
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    monkeypatch.setenv("VIT_ADMIN_KEY", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return tmp_path


def test_a_child_imports_nothing_of_the_folder(hostile_folder: Path) -> None:
    with start_python("model.linear_probe", stdout=subprocess.DEVNULL) as child:
        assert child.wait(60) == 0

    async def fit() -> int:
        process = await start_python_async("service.teach.fit", str(hostile_folder))
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
