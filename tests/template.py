"""`vitserve` processes, forked from a Python that has imported the service's packages.

Such a process is ready within a second, because it need not import torch, which takes two seconds.
Only imports are shared: each process has its own settings, arguments, output and environment.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest.mock import patch

_REPOSITORY = Path(__file__).resolve().parents[1]

multiprocessing.set_forkserver_preload(
    [
        "service.cli.serve",
        "service.single_process",
        "model.runtime.predictor",
        "model.checkpoint",
    ]
)


class ForkedProcess(ForkServerProcess):
    """`python -m service` with the methods of `subprocess.Popen`; it ends with this process.

    Args:
        log: file of the process's output.
    """

    def __init__(self, arguments: tuple[str, ...], environment: dict[str, str], log: Path) -> None:
        super().__init__(daemon=True)
        self._arguments = arguments
        self._environment = environment
        self._log = log
        with patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):  # torch reads it at import
            self.start()

    def run(self) -> None:
        """Run the service in this process."""
        with self._log.open("ab") as out:
            for standard in (1, 2):
                os.dup2(out.fileno(), standard)
        os.chdir(_REPOSITORY)
        os.environ.clear()
        os.environ.update(self._environment)
        sys.argv = ["vitserve", *self._arguments]
        runpy.run_module("service", run_name="__main__", alter_sys=True)  # ends with SystemExit

    @property
    def pid(self) -> int:
        """The process id."""
        assert self.ident is not None
        return self.ident

    @property
    def returncode(self) -> int | None:
        """-N after signal N; None while the process runs."""
        return self.exitcode

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; raise `subprocess.TimeoutExpired` after the timeout."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("vitserve", timeout or 0)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.exitcode is None:
            os.kill(self.pid, number)
