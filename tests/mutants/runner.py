"""Runs the tests of a mutant: in a copy of the repository, in a process forked from one that holds the libraries.

The tests run once on the unchanged code, which tells what each enters; of a mutant only those run that enter its
function.

Forked, because loading torch and pytest takes longer than most tests; in a copy, because tests start processes that
import the mutant too.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from tests.mutants.coverage import Entered, Recorder, Selection, selected
from tests.mutants.mutations import Mutant

MIN_TIMEOUT_S = 60.0
_TIMEOUT_FACTOR = 5
"""A mutant may take so many times as long as its tests took on the unchanged code."""

_TEST_TIMEOUT_S = 30
_WATCHED_TEST_TIMEOUT_S = 300
"""A test that is watched takes several times as long, and asyncio swallows an alarm that goes off between two turns."""

_POLL_S = 0.02
_PACKAGES = ("model", "service", "vitserve")
_LIBRARIES = (
    "fastapi",
    "hypothesis",
    "numpy",
    "PIL.Image",
    "prometheus_client",
    "pydantic_settings",
    "torch",
    "uvicorn",
)


class Verdict(Enum):
    """What became of a mutant."""

    KILLED = "killed"
    TIMEOUT = "timeout"
    SURVIVED = "survived"


def mirrored_tests(path: str, root: Path) -> Path:
    """Return the folder of tests that mirrors a module's package, or the nearest one above it; relative to `root`."""
    for package in Path(path).parents:
        if (root / "tests" / package).is_dir() and package != Path():
            return Path("tests") / package
    raise ValueError(f"no folder under tests mirrors {path}")


@dataclass
class _Tree:
    """A copy of the repository, in which one run at a time takes place."""

    folder: Path
    pid: int = 0
    mutant: Mutant | None = None
    original: bytes = b""
    modified_ns: int = 0
    deadline: float = 0.0

    @property
    def log(self) -> Path:
        return self.folder / "mutant.log"

    @property
    def result(self) -> Path:
        return self.folder / "mutant.json"


@dataclass
class Runner:
    """Runs mutants in `jobs` processes at a time.

    Attributes:
        tests: of each folder of tests, what its tests did on the unchanged code.
        killers: of each module, how many of its mutants each test noticed.
    """

    root: Path
    jobs: int
    tests: dict[Path, dict[str, Entered]] = field(default_factory=dict)
    killers: dict[str, Counter[str]] = field(default_factory=dict)

    def run(self, chosen: Iterable[Mutant]) -> Iterator[tuple[Mutant, Verdict]]:
        """Yield each mutant with its verdict, as they come.

        Raises:
            RuntimeError: the tests cannot be run on the unchanged code, or pytest itself fails.
        """
        waiting = deque(chosen)
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            first = _Tree(Path(folder) / "0")
            _copy(self.root, first.folder)
            for tests in sorted({mirrored_tests(mutant.path, self.root) for mutant in waiting}):
                self.tests[tests] = self._record(first, tests)
                for name in (name for name, test in self.tests[tests].items() if test.failed):
                    print(f"fails on the unchanged code, and judges nothing: {name}", flush=True)
            # Copied with the compiled modules that the unchanged run has left.
            free = [first, *(_Tree(Path(folder) / str(job)) for job in range(1, min(self.jobs, len(waiting))))]
            for tree in free[1:]:
                shutil.copytree(first.folder, tree.folder, symlinks=True)
            busy: list[_Tree] = []
            try:
                while waiting or busy:
                    while waiting and free:
                        busy.append(tree := free.pop())
                        self._start(tree, waiting.popleft())
                    time.sleep(_POLL_S)
                    for tree in list(busy):
                        verdict = self._verdict(tree)
                        if verdict is not None:
                            assert tree.mutant is not None
                            busy.remove(tree)
                            free.append(tree)
                            yield tree.mutant, verdict
            finally:
                for tree in busy:
                    _end(tree.pid)

    def _record(self, tree: _Tree, tests: Path) -> dict[str, Entered]:
        """Run a folder of tests on the unchanged code; return what each did."""
        recorder = Recorder(tree.folder, _PACKAGES)
        tree.pid = _fork(tree, [str(tests)], recorder, keep_bytecode=True)
        _, status = os.waitpid(tree.pid, 0)
        _end(tree.pid)
        if not os.WIFEXITED(status) or os.WEXITSTATUS(status) not in (0, 1):
            raise RuntimeError(f"{tests} does not run on the unchanged code:\n{tree.log.read_text()[-4000:]}")
        return {name: Entered.from_json(each) for name, each in json.loads(tree.result.read_text()).items()}

    def _start(self, tree: _Tree, mutant: Mutant) -> None:
        path = tree.folder / mutant.path
        tree.mutant, tree.original, tree.modified_ns = mutant, path.read_bytes(), path.stat().st_mtime_ns
        path.write_bytes(mutant.source)
        tests = self.tests[mirrored_tests(mutant.path, self.root)]
        names = selected(tests, mutant.path, mutant.function, self.killers.setdefault(mutant.path, Counter()))
        timeout = max(MIN_TIMEOUT_S, _TIMEOUT_FACTOR * sum(tests[name].seconds for name in names))
        tree.deadline = time.monotonic() + timeout
        files = sorted({name.partition("::")[0] for name in names})
        tree.pid = _fork(tree, files, Selection(names), keep_bytecode=False)

    def _verdict(self, tree: _Tree) -> Verdict | None:
        """Return what became of the mutant in a tree, with the tree as it was before; None while its tests run."""
        pid, status = os.waitpid(tree.pid, os.WNOHANG)
        if not pid and time.monotonic() < tree.deadline:
            return None
        _end(tree.pid)
        if not pid:
            os.waitpid(tree.pid, 0)
        assert tree.mutant is not None
        path = tree.folder / tree.mutant.path
        path.write_bytes(tree.original)
        os.utime(path, ns=(tree.modified_ns, tree.modified_ns))
        if not pid:
            return Verdict.TIMEOUT
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) in (0, 5):  # 5: there is no test that could notice it
            return Verdict.SURVIVED
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) not in (1, 2, 4):  # 4: not even conftest.py is imported
            raise RuntimeError(f"pytest ended with {os.WEXITSTATUS(status)}:\n{tree.log.read_text()[-4000:]}")
        if os.WIFEXITED(status):
            self.killers[tree.mutant.path].update(json.loads(tree.result.read_text()))
        return Verdict.KILLED


def _copy(root: Path, folder: Path) -> None:
    """Copy what git knows or would add; times too, so that compiled modules stay valid."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


def preload() -> None:
    """Import the libraries that tests use, and nothing of the repository."""
    for library in _LIBRARIES:
        importlib.import_module(library)


def _fork(tree: _Tree, tests: list[str], plugin: Recorder | Selection, *, keep_bytecode: bool) -> int:
    """Start pytest on the tests of a tree, as the leader of a process group; return its identifier."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 3
    try:
        os.setsid()
        output = os.open(tree.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        ended = _pytest(tree.folder, tests, plugin, keep_bytecode=keep_bytecode)
        tree.result.write_text(plugin.json())
        status = ended
    except BaseException:  # noqa: BLE001  whatever it is, this process ends here and says why in its log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _pytest(folder: Path, tests: list[str], plugin: Recorder | Selection, *, keep_bytecode: bool) -> int:
    here = Path.cwd()
    os.environ.setdefault("VIT_SHARED", str(here.parent / "shared"))
    os.environ["PYTHONPATH"] = str(folder)
    # A mutant of the same length, written in the same second, would be taken for the module compiled before.
    sys.dont_write_bytecode = not keep_bytecode
    if not keep_bytecode:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.chdir(folder)
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry and Path(entry) != here)]
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]
    options = ["-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
    if isinstance(plugin, Selection):
        options += ["-x", f"--timeout={_TEST_TIMEOUT_S}"]
    else:
        options.append(f"--timeout={_WATCHED_TEST_TIMEOUT_S}")
    return int(pytest.main([*options, *tests], plugins=[plugin]))


def _end(pid: int) -> None:
    """Kill what is left of a run, such as servers that its tests started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
