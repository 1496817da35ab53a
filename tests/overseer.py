"""A plugin for the process that hands tests out to others: what became of those, and an end for a run that hangs."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest


class Overseer:
    """Says with which exit code a process ended, and ends a run that stands still.

    Args:
        seconds: time for all tests; without a limit if None.
        timer: calls a function after it.
    """

    def __init__(
        self,
        seconds: float | None,
        timer: Callable[[float, Callable[[], None]], threading.Timer] = threading.Timer,
    ) -> None:
        self._seconds = seconds
        self._timer = timer
        self._running: dict[str, float] = {}
        self._ends: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        timer = self._timer(self._seconds, _thread.interrupt_main) if self._seconds else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            return (yield)
        finally:
            if timer is not None:
                timer.cancel()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when not in ("setup", "call"):  # "???" where its process ended
            self._running.pop(report.nodeid, None)

    @pytest.hookimpl(tryfirst=True)  # before what it left behind is handed out again
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error is not None:
            code = node.gateway._io.popen.wait(10)  # the one place that has it
            self._ends.append(f"{node.gateway.id} ended with {code}" + (" (by a signal)" if code < 0 else ""))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        now = time.monotonic()
        lines = self._ends + [
            f"still running after {now - since:.0f} s: {name}" for name, since in self._running.items()
        ]
        if lines:
            terminalreporter.section("test processes")
            for line in lines:
                terminalreporter.line(line)
