"""The parent of a service's processes: starts them, starts them again, and ends them in order.

    supervisor -- forks --> engine 0 ... (one a device), worker 0 ... (web)

* A child that dies is started again, at once the first time, then after a delay that doubles up to
  `_MAX_DELAY`; one that lived for `_LONG_LIFE` begins anew. Meanwhile the others go on: workers answer 503
  when no engine is left, and connections of a worker wait for its successor.
* A child that ends before it ever ran ends the service with 1: what cannot start will not start by itself.
* SIGTERM or SIGINT: the workers drain, then the engines end, exit code 0. The second one ends all at once.
* When the supervisor itself is killed, the kernel kills its children.

It is a plain loop, without threads of its own or an event loop: so it can fork at any time, and there is little in
it that can fail.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from service.web.server import exit_now

logger = logging.getLogger("vitserve")

_MAX_DELAY = 30.0
_LONG_LIFE = 60.0
_GRACE = 5.0
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1}
_PR_SET_PDEATHSIG = 1


@dataclass(eq=False)
class Child:
    """One place for a process, and the process that has it now.

    Attributes:
        name: for the log.
        main: what the process does; its result is the exit code.
        stop: the signal that ends it in order.
        is_running: whether the process does its work, by what it has written.
        on_death: what to do about what the process left behind.
        on_restart: called before it is started again.
    """

    name: str
    main: Callable[[], int]
    stop: signal.Signals
    is_running: Callable[[], bool]
    on_death: Callable[[], None] = lambda: None
    on_restart: Callable[[], None] = lambda: None
    ever_ran: bool = False
    pid: int | None = None
    started: float = 0.0
    delay: float = 0.0
    start_at: float | None = 0.0


class Supervisor:
    """See the module.

    Args:
        workers, engines: what to run.
        drain_timeout: seconds after which workers have ended by themselves.
        on_tick: called at least every second, and when a child has something to say.
        on_drain: called when no worker is to be started any more.
    """

    def __init__(
        self,
        workers: Sequence[Child],
        engines: Sequence[Child],
        *,
        drain_timeout: float,
        on_tick: Callable[[], None],
        on_drain: Callable[[], None],
    ) -> None:
        self._workers = workers
        self._engines = engines
        self._children = (*engines, *workers)
        self._drain_timeout = drain_timeout
        self._on_tick = on_tick
        self._on_drain = on_drain
        self._kill_at: float | None = None
        self._exit_code = 0
        self._signals_in, self._signals_out = os.pipe()

    def run(self) -> int:
        """Until every child has ended.

        Returns:
            The exit code of the service.
        """
        # A signal is a byte in a pipe, whichever thread it interrupts: numerical libraries have some of their own.
        os.set_blocking(self._signals_out, False)
        signal.set_wakeup_fd(self._signals_out, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, _no_handler)
        gc.freeze()  # else the collector would write to pages that the children share, and copy them
        while True:
            self._start_due()
            for received in self._received():
                if received in (signal.SIGTERM, signal.SIGINT):
                    self._on_signal(signal.Signals(received))
            self._reap()
            self._on_tick()
            if self._kill_at is not None and self._end():
                return self._exit_code

    def _received(self) -> bytes:
        """The numbers of the signals that came, as soon as some did or there is something else to do."""
        readable, _, _ = select.select([self._signals_in], [], [], self._patience())
        return os.read(self._signals_in, 1024) if readable else b""

    def _patience(self) -> float:
        """Seconds to sleep: until the next child is to be started, at most one."""
        now = time.monotonic()
        due = (child.start_at - now for child in self._children if child.start_at is not None)
        return min(1.0, max(0.0, min(due, default=1.0)))

    def _start_due(self) -> None:
        for child in self._children:
            if child.start_at is not None and child.start_at <= time.monotonic() and self._kill_at is None:
                self._start(child)

    def _start(self, child: Child) -> None:
        parent = os.getpid()
        child.started, child.start_at = time.monotonic(), None
        # Until the child has handlers of its own it must not write into this pipe.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        child.pid = os.fork()
        if child.pid == 0:
            _become(child, parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _reap(self) -> None:
        while any(child.pid is not None for child in self._children):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            for child in self._children:
                if child.pid == pid:
                    self._on_end(child, os.waitstatus_to_exitcode(status))

    def _on_end(self, child: Child, code: int) -> None:
        child.ever_ran |= child.is_running()
        child.pid = None
        child.on_death()
        if self._kill_at is not None:
            return
        how = f"signal {-code}" if code < 0 else f"code {code}"
        if not child.ever_ran:
            logger.critical("%s ended with %s before it was ready", child.name, how)
            self._drain(exit_code=1)
            return
        now = time.monotonic()
        if now - child.started > _LONG_LIFE:
            child.delay = 0.0
        logger.error("%s ended with %s: starting it again in %g s", child.name, how, child.delay)
        child.on_restart()
        child.start_at = now + child.delay
        child.delay = min(_MAX_DELAY, 2 * child.delay or 1.0)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._kill_at is not None:
            logger.warning("%s again: ending at once", number.name)
            self._exit_code, self._kill_at = 128 + number, time.monotonic()
            self._kill(self._children)
            return
        logger.info("%s: draining", number.name)
        self._drain(exit_code=0)

    def _drain(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._kill_at = time.monotonic() + self._drain_timeout + _GRACE
        self._on_drain()
        self._signal(self._workers)

    def _end(self) -> bool:
        """Engines after workers; whoever does not end in time is killed. Whether all have ended."""
        now = time.monotonic()
        assert self._kill_at is not None
        if any(child.pid is not None for child in self._workers):
            if now > self._kill_at:
                self._kill(self._children)
            return False
        if any(child.pid is not None for child in self._engines):
            if self._kill_at <= now:
                self._kill(self._engines)
            else:
                self._signal(self._engines)
                self._kill_at = min(self._kill_at, now + _GRACE)
            return False
        return True

    @staticmethod
    def _signal(children: Sequence[Child]) -> None:
        for child in children:
            if child.pid is not None:
                os.kill(child.pid, child.stop)

    @staticmethod
    def _kill(children: Sequence[Child]) -> None:
        for child in children:
            if child.pid is not None:
                os.kill(child.pid, signal.SIGKILL)


def _become(child: Child, parent: int) -> NoReturn:
    """The forked process's whole life."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else it died before the kernel knew
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            code = child.main()
    except Exception:
        logger.exception("%s failed", child.name)
    finally:
        exit_now(code)


def _no_handler(number: int, frame: object) -> None:
    """The byte in the pipe says it all."""
