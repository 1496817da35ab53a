"""A Python that has imported what a service imports, and is forked for each `vitserve` process that a test starts.

Such a process is ready within a second, where importing torch and the rest anew takes two seconds of a processor. It
shares no more with another than what imports leave behind: settings, arguments, output and environment are its own.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

_REPOSITORY = Path(__file__).resolve().parents[1]
_IMPORTED = ("service.cli.serve", "service.web.app", "model.runtime.predictor", "model.checkpoint")
_LONGEST = 1 << 20
_lock = threading.Lock()


class ForkedProcess:
    """What tests use of `subprocess.Popen`, of a process that is the template's child, not this one's.

    Attributes:
        returncode: -N after signal N; None while it runs, as far as was looked.
    """

    def __init__(self, template: Template, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._template = template
        self._end = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended; raises `subprocess.TimeoutExpired`."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("vitserve", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._end, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], timeout)[0]:
            self.returncode = self._template.exit_code(self.pid)
            os.close(self._end)
        return self.returncode


class Template:
    """The process that is forked; it ends with this one.

    Args:
        environment: what imports read.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.template", str(theirs.fileno())],
                cwd=_REPOSITORY,
                env=environment,
                stdout=subprocess.DEVNULL,  # each process has its own, which is a file as this is
                pass_fds=[theirs.fileno()],
            )

    def start(self, arguments: tuple[str, ...], environment: dict[str, str], out: BinaryIO) -> ForkedProcess:
        """Start `python -m service` with these arguments and this environment, and its output in `out`."""
        return ForkedProcess(self, self._ask({"arguments": arguments, "environment": environment}, out))

    def exit_code(self, pid: int) -> int:
        """Return the exit code of a process that has ended."""
        return self._ask({"ended": pid})

    def _ask(self, question: object, *files: BinaryIO) -> int:
        with _lock:
            socket.send_fds(self._socket, [json.dumps(question).encode()], [file.fileno() for file in files])
            answer = self._socket.recv(_LONGEST)
        if not answer:
            raise RuntimeError("the template of the tests' processes has ended")
        return int(answer)


def _main(connection: socket.socket) -> None:
    """Fork for each start that is asked for, until the other side closes."""
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    while True:
        question, ancillary, _, _ = connection.recvmsg(_LONGEST, socket.CMSG_LEN(4))
        if not question:
            return
        asked = json.loads(question)
        if "ended" in asked:
            _, status = os.waitpid(asked["ended"], 0)
            connection.send(b"%d" % os.waitstatus_to_exitcode(status))
            continue
        [out] = array.array("i", ancillary[0][2])
        if pid := os.fork():
            os.close(out)
            connection.send(b"%d" % pid)
            continue
        connection.close()
        for standard in (1, 2):
            os.dup2(out, standard)
        os.close(out)
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.argv = ["vitserve", *asked["arguments"]]
        runpy.run_module("service", run_name="__main__", alter_sys=True)  # ends with SystemExit


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
