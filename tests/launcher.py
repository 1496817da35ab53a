"""The launcher of `vitserve` processes, for tests from a user's view.

The report of a failed test shows the logs of its processes; see tests/conftest.py.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import httpx

from tests.template import ForkedProcess

PATIENCE = 100.0
"""Seconds until a test gives up, also on a busy machine."""

_REPOSITORY = Path(__file__).resolve().parents[1]
_SHOWN = 10_000

_started: list[VitserveProcess] = []
_reserved: list[socket.socket] = []


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; raise `AssertionError` after `PATIENCE` seconds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"it did not come true within {PATIENCE:g} s"
        time.sleep(0.02)


def free_port() -> int:
    """Return a free port, which the kernel does not assign elsewhere during these tests."""
    reserved = socket.socket()
    for option in (
        socket.SO_REUSEADDR,
        socket.SO_REUSEPORT,
    ):  # so that a server may listen on the port
        reserved.setsockopt(socket.SOL_SOCKET, option, 1)
    reserved.bind(("127.0.0.1", 0))
    _reserved.append(reserved)
    port: int = reserved.getsockname()[1]
    return port


def listens(port: int) -> bool:
    """Return whether a server listens on the port of this machine."""
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def run_vitserve(*arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run `vitserve` to its end and capture its output; keywords are settings."""
    return subprocess.run(
        _command(arguments),
        cwd=_REPOSITORY,
        env=_environment(settings),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


class VitserveProcess:
    """A `vitserve` process; as a context manager it is killed at the end.

    Args:
        log: file of the process's output.
        arguments: command line without the program.
        warm: fork the process from a process that has imported torch. Tests of imports, memory or
            starts need a new process. So does an environment that changes how Python starts.
        settings: settings in lower case; the environment's settings do not reach the process.
    """

    process: subprocess.Popen[bytes] | ForkedProcess

    def __init__(self, log: Path, *arguments: str, warm: bool = False, **settings: object) -> None:
        self.command = " ".join(("vitserve", *arguments))
        self._log = log
        environment = _environment(settings)
        with log.open("wb") as out:
            if warm and _read_by_imports() == _READ_BY_IMPORTS:
                self.process = ForkedProcess(arguments, environment, log)
            else:
                self.process = subprocess.Popen(
                    _command(arguments),
                    cwd=_REPOSITORY,
                    env=environment,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
        _started.append(self)

    @property
    def log(self) -> str:
        """Return the output so far."""
        return self._log.read_text(errors="replace")

    def terminate(self) -> int:
        """Send SIGTERM, and return the exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """Kill a process that still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class ServerProcess(VitserveProcess):
    """A `vitserve serve` process, by default on a free port and without a delay before it stops.

    Args:
        wait: wait until the process is ready; otherwise `url` is not set.
    """

    def __init__(
        self, log: Path, *, wait: bool = True, warm: bool = False, **settings: object
    ) -> None:
        super().__init__(log, "serve", warm=warm, **({"port": 0, "drain_delay": 0} | settings))
        if wait:
            self.url = self._wait_until_ready()

    def _wait_until_ready(self) -> str:
        def has_ended_or_is_ready() -> bool:
            return self.process.poll() is not None or self._ready_url() is not None

        try:
            until(has_ended_or_is_ready)
        except AssertionError:
            self.kill()
            raise AssertionError(
                f"the server was not ready within {PATIENCE:g} s:\n{self.log}"
            ) from None
        url = self._ready_url()
        assert url is not None, f"the server ended with {self.process.returncode}:\n{self.log}"
        return url

    def _ready_url(self) -> str | None:
        found = re.search(r"ready: (http://[\d.:]+)", self.log)
        return found[1] if found else None

    def metrics(self) -> dict[str, float]:
        """Return each sample of /metrics by its name with labels."""
        # Reading the system's certificates would take longer than the request.
        answer = httpx.get(f"{self.url}/metrics", trust_env=False, verify=False)
        lines = answer.text.splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def cpu_seconds(self) -> float:
        """Return the seconds of processor time that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Return the current memory of the process."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def reset_peak(self) -> None:
        """Restart the measurement of `peak_bytes`."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Return the peak memory of the process since `reset_peak`."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        [kibibytes] = re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        return int(kibibytes) << 10


def recent_logs() -> list[tuple[str, str]]:
    """Return command line and last log lines of all processes since `forget_ended`."""
    return [(found.command, found.log[-_SHOWN:]) for found in _started]


def forget_ended() -> None:
    """Leave ended processes out of `recent_logs`."""
    _started[:] = [found for found in _started if found.process.poll() is None]


def _command(arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "service", *arguments]


def _read_by_imports() -> dict[str, str]:
    """Return the part of the environment that Python and imports read; a test may change it."""
    return {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "TMP"))}


_READ_BY_IMPORTS = _read_by_imports()


def _environment(settings: dict[str, object]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VIT_")}
    inherited = {"OMP_NUM_THREADS": "1"} | inherited
    settings = {"cache_dir": "off"} | settings  # graphs of other runs are not used
    return inherited | {f"VIT_{name.upper()}": str(value) for name, value in settings.items()}


def command_line(pid: int) -> bytes:
    """Return the title of the process; empty after its end."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
