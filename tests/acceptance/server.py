"""A real `vitserve serve` process, for tests that measure what a user would see."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

_REPOSITORY = Path(__file__).resolve().parents[2]


class ServerProcess:
    """Starts, waits until it is ready, and ends with SIGTERM.

    Args:
        log: file for everything that it writes.
        wait: until it is ready; without it there is no `url`.
        settings: in lower case; by default on a free port, and without a delay before it stops.
    """

    def __init__(self, log: Path, *, wait: bool = True, **settings: object) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VIT_")}
        settings = {"port": 0, "drain_delay": 0} | settings
        environment |= {f"VIT_{name.upper()}": str(value) for name, value in settings.items()}
        self._log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "service", "serve"],
                cwd=_REPOSITORY,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        if wait:
            self.url = self._wait_until_ready()

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = re.search(r"ready: (http://[\d.:]+)", self.log)
            if found:
                return found[1]
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"the server was not ready within 60 s:\n{self.log}")

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """Each sample of /metrics by its name with labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def resident_bytes(self) -> int:
        """Memory of the process right now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def reset_peak(self) -> None:
        """Let `peak_bytes` count from now on."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """The most memory that the process had since `reset_peak`."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        [kibibytes] = re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        return int(kibibytes) << 10

    def terminate(self, timeout: float = 60) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
