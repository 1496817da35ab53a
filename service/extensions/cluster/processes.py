"""Wraps the operating system for the supervisor: clock, signals, forked processes, reports."""

import asyncio
import contextlib
import ctypes
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from service.draining import exit_now, stop_signals
from service.models.override import Override

logger = logging.getLogger("vitserve")

# Interval of a process's heartbeats.
BEAT_SECONDS: Final = 0.5

# State of a running process: a worker listens, an engine is warm.
RUNNING: Final = 1

# State of a worker with a ready model, and of an engine.
SERVING: Final = 2

_PR_SET_PDEATHSIG: Final = 1

# Fields of /proc/PID/stat after the name: begin and end of the arguments in memory.
_ARGUMENTS: Final = slice(45, 47)


class Report(msgspec.Struct, omit_defaults=True):
    """A message from a process to the supervisor; an empty report is a heartbeat.

    Attributes:
        state: `RUNNING` or `SERVING`, if the state has changed.
        overrides: see `service.models.override`, by model.
        answered, refused: counts of requests since the stop signal, in the last report.
        options: settings that override the service's in the process's successors.
    """

    state: int = 0
    overrides: dict[str, Override] = {}
    answered: int = 0
    refused: int = 0
    options: dict[str, str | int] = {}


class Link:
    """A pipe from a process to the supervisor, created before the fork; successors inherit it."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._rest = b""

    def fileno(self) -> int:
        """Return a descriptor that is readable when reports have arrived."""
        return self._read_end

    def send(self, report: Report) -> None:
        """Send a report, or drop it if the pipe is full because the supervisor is stopped."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_end, msgspec.json.encode(report) + b"\n")

    def receive(self) -> list[Report]:
        """Return the reports that have arrived."""
        with contextlib.suppress(BlockingIOError):
            self._rest += os.read(self._read_end, 1 << 16)
        *lines, self._rest = self._rest.split(b"\n")
        return [msgspec.json.decode(line, type=Report) for line in lines]

    async def beat(self, publish: Callable[[], None] = lambda: None) -> None:
        """Send heartbeats and call `publish` at an interval, until cancelled."""
        while True:
            self.send(Report())
            publish()
            await asyncio.sleep(BEAT_SECONDS)


class OperatingSystem:
    """Gives the time, signals and child processes.

    It installs signal handlers, so only the main thread may create it.
    """

    def __init__(self) -> None:
        # A signal writes a byte into this pipe, whichever thread it interrupts: numerical libraries
        # have threads, too.
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._signals = {*stop_signals(), signal.SIGCHLD}
        for number in self._signals:
            # A signal needs any handler to write its byte.
            signal.signal(number, lambda *_: None)

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def spawn(self, name: str, main: Callable[[], int]) -> int:
        """Fork a process that exits with the result of `main` and dies with its parent.

        Returns:
            The pid of the process.
        """
        parent = os.getpid()
        # The child must not write into this pipe before it has its own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        pid = os.fork()
        if pid == 0:
            _live(name, main, parent, self._signals)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        return pid

    def kill(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def wait(self, seconds: float, links: Sequence[Link]) -> list[int]:
        """Wait for signals or reports, at most some seconds; return the signals."""
        readable, _, _ = select.select(
            [self._read_end, *(link.fileno() for link in links)], [], [], seconds
        )
        if self._read_end not in readable:
            return []
        return list(os.read(self._read_end, 1024))

    def reap(self) -> list[tuple[int, int]]:
        """Return pid and exit code of newly ended processes; the code is -N after signal N."""
        ended: list[tuple[int, int]] = []
        with contextlib.suppress(ChildProcessError):  # all children have ended
            while (status := os.waitpid(-1, os.WNOHANG))[0]:
                ended.append((status[0], os.waitstatus_to_exitcode(status[1])))
        return ended


def _live(
    name: str, main: Callable[[], int], parent: int, signals: set[signal.Signals]
) -> NoReturn:
    """Run the forked process to its end."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # otherwise the parent died before `prctl`
            signal.set_wakeup_fd(-1)
            for number in signals:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            _set_title(f"vitserve: {name}")
            code = main()
    except Exception:
        logger.exception("%s failed", name)
    finally:
        exit_now(code)


def _set_title(title: str) -> None:
    """Overwrite the command line of this process, for `ps`, `docker top`, `systemctl status`."""
    with contextlib.suppress(OSError), Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        first, end = map(
            int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_ARGUMENTS]
        )
        memory.seek(first)
        memory.write(title.encode()[: end - first - 1].ljust(end - first, b"\0"))
