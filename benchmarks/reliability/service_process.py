"""A `vitserve serve` that is started, hurt and started again on the same port."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import httpx

from benchmarks.checkpoints import REPOSITORY
from benchmarks.servers import free_port

_START_SECONDS = 120.0


class ServiceProcess:
    """The service, and whoever supervises it: `restart_if_ended` is what systemd or Docker would do.

    Args:
        log: file for what all of its lives write.
        settings: environment variables.
        core: the only one that it may use; None: all.
    """

    def __init__(self, log: Path, settings: Mapping[str, str], core: int | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._pinned = [] if core is None else ["taskset", "-c", str(core)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VIT_")}
        self._environment = kept | {"VIT_PORT": str(self.port), "VIT_LOG_LEVEL": "warning", **settings}
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything that it has written."""
        return self._log.read_text(errors="replace")

    def processor_seconds(self) -> float:
        """Return the processor time, user's and system's, that its processes have used."""
        return processor_seconds(self.pids())

    def pids(self) -> list[int]:
        """Return the process and its children."""
        return [self.pid, *self._children()]

    def engines(self) -> list[int]:
        """Return the children that have loaded the network; workers never load torch."""
        return [pid for pid in self._children() if _has_torch(pid)]

    def workers(self) -> list[int]:
        """Return the other children."""
        return [pid for pid in self._children() if not _has_torch(pid)]

    def is_ready(self) -> bool:
        """Whether it says that it can be given work."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_until_ready(self) -> float:
        """Wait, start it again where it has ended, and return the seconds.

        Raises:
            TimeoutError: it took more than two minutes.
        """
        began = time.monotonic()
        while not self.is_ready():
            self.restart_if_ended()
            if time.monotonic() - began > _START_SECONDS:
                raise TimeoutError(f"not ready after {_START_SECONDS:g} s:\n{self.log[-3000:]}")
            time.sleep(0.05)
        return time.monotonic() - began

    def restart_if_ended(self) -> None:
        """Start it again where it has ended."""
        if self._process.poll() is not None:
            self._process = self._start()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process that was started."""
        self._process.send_signal(number)

    def stop(self) -> int:
        """End it in order, with all of its children, and return the exit code."""
        children = self._children()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._process.terminate()
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(10)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as out:
            return subprocess.Popen(
                [*self._pinned, sys.executable, "-m", "service", "serve"],
                cwd=REPOSITORY,
                env=self._environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def _children(self) -> list[int]:
        try:
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        except OSError:
            return []


def processor_seconds(pids: Iterable[int]) -> float:
    """Return the processor time, user's and system's, that some processes have used."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    ticks = sum(int(user) + int(system) for user, system in (one[11:13] for one in fields))
    return ticks / os.sysconf("SC_CLK_TCK")


def _has_torch(pid: int) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
