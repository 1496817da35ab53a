"""Plugins of pytest: one records the functions that each test enters, one runs those tests alone that enter one."""

from __future__ import annotations

import inspect
import json
import sys
import threading
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


@dataclass
class Entered:
    """What one test did on the unchanged code.

    Attributes:
        functions: (file relative to the repository, qualified name) of each function that was called, in any thread.
        seconds: from the test's first fixture to its end.
        failed: it fails on the unchanged code, at least while it is watched, and judges nothing.
    """

    functions: set[tuple[str, str]] = field(default_factory=set)
    seconds: float = 0.0
    failed: bool = False

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Entered:
        """Return what `Recorder.json` wrote of one test."""
        return cls({(path, name) for path, name in value["functions"]}, value["seconds"], value["failed"])


class Recorder:
    """Records what each test enters among the files of a repository's packages."""

    def __init__(self, root: Path, packages: Sequence[str]) -> None:
        self.tests: dict[str, Entered] = {}
        self._root = f"{root}/"
        self._prefixes = tuple(f"{root}/{package}/" for package in packages)
        self._current: Entered | None = None

    def _enter(self, frame: FrameType, event: str, argument: object) -> None:
        code, current = frame.f_code, self._current
        if current is None or event != "call" or not code.co_flags & inspect.CO_OPTIMIZED:
            return  # modules and the bodies of classes run once, in whichever test is the first to import them
        if code.co_filename.startswith(self._prefixes):
            current.functions.add((code.co_filename.removeprefix(self._root), _function_of(code.co_qualname)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, Any, Any]:
        """Watch calls in all threads that start from now on."""
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Credit the calls to this test."""
        self._current = self.tests.setdefault(item.nodeid, Entered())
        sys.settrace(self._enter)  # Python drops it when it cannot be called, as in a test of too deep a recursion
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the time of set-up, call and tear-down."""
        self.tests[report.nodeid].seconds += report.duration
        self.tests[report.nodeid].failed |= report.failed

    def json(self) -> str:
        """Return what each test did, by its name."""
        return json.dumps({name: asdict(each) for name, each in self.tests.items()}, default=sorted)


def _function_of(qualified: str) -> str:
    """Return the function that a piece of code stands in, such as the one around a comprehension.

    A lambda in the body of a class, such as a field's default, stays apart: who calls it is not all that may notice a
    change of the other fields.
    """
    *parts, last = qualified.split(".")
    if last == "<lambda>" and parts and parts[-1] != "<locals>":
        return qualified
    return ".".join(part for part in (*parts, last) if not part.startswith("<"))


@dataclass
class Selection:
    """Runs given tests alone, in their order, and names the one that fails."""

    wanted: list[str]
    failed: list[str] = field(default_factory=list)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the wanted tests."""
        place = {name: number for number, name in enumerate(self.wanted)}
        items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember a failure."""
        if report.failed:
            self.failed.append(report.nodeid)

    def json(self) -> str:
        """Return the names of the tests that failed."""
        return json.dumps(self.failed)


def selected(tests: dict[str, Entered], path: str, function: str, killers: Counter[str]) -> list[str]:
    """Return the tests that may notice a change of a function: those that noticed others first, then the quickest.

    Those are the tests that enter it; where none does, as with modules and the bodies of classes, all, and first those
    that enter a function of the module; and last those that enter nothing, because they work through processes of their
    own.
    """
    tests = {name: test for name, test in tests.items() if not test.failed}
    inside = [name for name, test in tests.items() if test.functions]
    entering = [name for name in inside if (path, function) in tests[name].functions]
    near = {name for name in inside if any(file == path for file, _ in tests[name].functions)}
    outside = [name for name, test in tests.items() if not test.functions]
    return [
        *sorted(entering or inside, key=lambda name: (name not in near, -killers[name], tests[name].seconds)),
        *sorted(outside, key=lambda name: tests[name].seconds),
    ]
