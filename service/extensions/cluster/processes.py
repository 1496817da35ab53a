"""Wraps the operating system for the supervisor: a clock, signals, processes by fork, and what
these report.
"""

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

from service.lifecycle import exit_now, stop_signals
from service.models.generation import Version

logger = logging.getLogger("vitserve")

# Seconds between two signs of life of a process.
BEAT_SECONDS: Final = 0.5

# State of a process that does its work: a worker listens, an engine is warm.
RUNNING: Final = 1

# State of a worker that knows of a model as well, and of an engine.
SERVING: Final = 2

# Where the arguments of a process begin and end in its memory, of the fields of /proc/PID/stat
# after its name.
_PR_SET_PDEATHSIG: Final = 1
_ARGUMENTS: Final = slice(45, 47)


class Report(msgspec.Struct, omit_defaults=True):
    """A process' message to the supervisor; an empty one says that its event loop turns.

    Attributes:
        state: `RUNNING` or `SERVING`, if that has changed.
        versions: of the models that are served, or were deleted, instead of what is configured.
        answered, refused: requests since the process was asked to end, in its last report.
        options: settings that its successors are to start with instead of those of the service.
    """

    state: int = 0
    versions: dict[str, Version] = {}
    answered: int = 0
    refused: int = 0
    options: dict[str, str | int] = {}


class Link:
    """A pipe from a process to the supervisor, made before the process is forked and inherited by
    its successors.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._rest = b""

    def fileno(self) -> int:
        """Return the descriptor that is readable when reports have come."""
        return self._read_end

    def send(self, report: Report) -> None:
        """Send a report; one that finds no room, as the supervisor stands still, is dropped."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_end, msgspec.json.encode(report) + b"\n")

    def receive(self) -> list[Report]:
        """Return the reports that have come."""
        with contextlib.suppress(BlockingIOError):
            self._rest += os.read(self._read_end, 1 << 16)
        *lines, self._rest = self._rest.split(b"\n")
        return [msgspec.json.decode(line, type=Report) for line in lines]

    async def beat(self, publish: Callable[[], None] = lambda: None) -> None:
        """Send an empty report and call `publish` again and again, until cancelled."""
        while True:
            self.send(Report())
            publish()
            await asyncio.sleep(BEAT_SECONDS)


class OperatingSystem:
    """Gives the time, signals and child processes; takes over the signal handlers, so only the main
    thread may.
    """

    def __init__(self) -> None:
        # A signal is a byte in a pipe, whichever thread it interrupts: numerical libraries have
        # some of their own.
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._signals = {*stop_signals(), signal.SIGCHLD}
        for number in self._signals:
            signal.signal(
                number, lambda *_: None
            )  # a signal that has any handler puts its byte into the pipe

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def spawn(self, name: str, main: Callable[[], int]) -> int:
        """Start a process that exits with the result of `main`, and return its pid; it dies with
        this process.
        """
        parent = os.getpid()
        # Until the child has handlers of its own it must not write into this pipe.
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        pid = os.fork()
        if pid == 0:
            _live(name, main, parent, self._signals)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        return pid

    def kill(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process."""
        os.kill(pid, number)

    def wait(self, seconds: float, links: Sequence[Link]) -> list[int]:
        """Return the signals that arrived, once there are any, or reports have come, or some
        seconds have passed.
        """
        readable, _, _ = select.select(
            [self._read_end, *(link.fileno() for link in links)], [], [], seconds
        )
        return list(os.read(self._read_end, 1024)) if self._read_end in readable else []

    def reap(self) -> list[tuple[int, int]]:
        """Return (pid, exit code) of the processes that ended since the last call; -N after signal
        N.
        """
        ended: list[tuple[int, int]] = []
        with contextlib.suppress(ChildProcessError):  # there are none left
            while (status := os.waitpid(-1, os.WNOHANG))[0]:
                ended.append((status[0], os.waitstatus_to_exitcode(status[1])))
        return ended


def _live(
    name: str, main: Callable[[], int], parent: int, signals: set[signal.Signals]
) -> NoReturn:
    """Run the forked process, from its first moment to its end."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else it died before the kernel knew
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
    """Write a title over the command line of this process, which `ps`, `docker top` and `systemctl
    status` show.
    """
    with contextlib.suppress(OSError), Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        first, end = map(
            int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_ARGUMENTS]
        )
        memory.seek(first)
        memory.write(title.encode()[: end - first - 1].ljust(end - first, b"\0"))
