"""Starts a service's processes, starts them again when they die, and ends them in order.

    supervisor -- forks --> engine 0 ... (one a device), worker 0 ... (web)

* A child that dies is started again, at once the first time, then after a delay that doubles up to
  `_MAX_DELAY`; a child that lived for `_LONG_LIFE` begins anew. Meanwhile the others go on: workers answer 503
  when no engine is left, and connections of a worker wait for its successor.
* A child that is frozen (`service.cluster.heartbeat`) is killed.
* A child that ends before it ever ran ends the service with 1: what cannot start will not start by itself. So does one
  that was started again `_MOST_FAILED_RESTARTS` times in a row and failed each time: a GPU that is lost inside of a
  container comes back in a new container only.
* A child that ends with `TRY_AGAIN` is started again at once, whether it ever ran or not: it has recorded the
  option that its successor is to change.
* A child that is spare, the engine of another generation than the current one (`service.cluster.swap`), is not started
  again when it ends.
* SIGTERM, SIGINT or SIGHUP: the workers drain, then the engines end, exit code 0. A second SIGTERM or SIGINT ends
  all at once. SIGHUP does so only if `on_hang_up` has not done what it asks for.
* When the supervisor itself is killed, the kernel kills its children.

The supervisor is a plain loop without threads or an event loop. So it can fork at any time, and little in it can fail.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from service.cluster.heartbeat import Pulse
from service.cluster.processes import OperatingSystem

logger = logging.getLogger("vitserve")

TRY_AGAIN = 75
"""Exit code of a child whose successor starts with another option (EX_TEMPFAIL of sysexits.h)."""

_MAX_DELAY = 30.0
_MOST_FAILED_RESTARTS = 5
_LONG_LIFE = 60.0
_GRACE = 5.0
_LONGEST_WAIT = 1.0


@dataclass(eq=False)
class Child:
    """A child process of the supervisor, which may be started again after it died.

    Attributes:
        main: the work of the process; its result is the exit code.
        stop: the signal that ends it in order.
        is_running: whether the process does its work, as its shared cells say.
        beats: the count of its event loop, see `service.cluster.heartbeat`.
        on_death: clears what the process left behind.
        failures: how often in a row it ended with an exit code soon after its start; what a signal ends did not fail.
        start_at: when it is to be started; None while it runs or is not to be started any more.
        spare: whether the service does without it.
    """

    name: str
    main: Callable[[], int]
    stop: signal.Signals
    is_running: Callable[[], bool]
    beats: Callable[[], int]
    on_death: Callable[[], None] = lambda: None
    on_restart: Callable[[], None] = lambda: None
    ever_ran: bool = False
    pid: int | None = None
    started: float = 0.0
    delay: float = 0.0
    failures: int = 0
    start_at: float | None = 0.0
    spare: bool = False
    pulse: Pulse = field(default_factory=Pulse)


class Supervisor:
    """Runs a service's processes; the module's text says how.

    Args:
        drain_timeout: seconds within which workers end by themselves.
        on_tick: called at least every second, and when a child has something to say.
        on_drain: called when no worker is to be started any more.
        on_hang_up: returns whether it has done what SIGHUP asks for.
    """

    def __init__(
        self,
        workers: Sequence[Child],
        engines: Sequence[Child],
        system: OperatingSystem,
        *,
        drain_timeout: float,
        on_tick: Callable[[], None],
        on_drain: Callable[[], None],
        on_hang_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._workers = workers
        self._engines = engines
        self._children = (*engines, *workers)
        self._system = system
        self._drain_timeout = drain_timeout
        self._on_tick = on_tick
        self._on_drain = on_drain
        self._on_hang_up = on_hang_up
        self._kill_at: float | None = None
        self._hung_up = False
        self._exit_code = 0

    def run(self) -> int:
        """Run until every child has ended, and return the exit code of the service."""
        while True:
            self._start_due()
            for received in self._system.wait_for_signals(self._seconds_to_wait()):
                if received in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    self._on_signal(signal.Signals(received))
            for pid, code in self._system.reap():
                for child in self._children:
                    if child.pid == pid:
                        self._on_end(child, code)
            self._kill_frozen()
            self._on_tick()
            if self._kill_at is not None and self._has_ended():
                return self._exit_code

    def _seconds_to_wait(self) -> float:
        """Return the seconds until the next child is to be started, at most `_LONGEST_WAIT`."""
        now = self._system.now()
        due = (child.start_at - now for child in self._children if child.start_at is not None)
        return min(_LONGEST_WAIT, max(0.0, min(due, default=_LONGEST_WAIT)))

    def _start_due(self) -> None:
        for child in self._children:
            now = self._system.now()
            if child.start_at is not None and child.start_at <= now:
                child.started, child.start_at = now, None
                child.pid = self._system.spawn(child.name, child.main)

    def _kill_frozen(self) -> None:
        if self._kill_at is not None:  # a child that does not end in time is killed anyway
            return
        now = self._system.now()
        for child in self._children:
            if child.pid is None:
                continue
            starting = not child.is_running()
            if child.pulse.is_frozen(now, child.beats(), self._system.cpu_seconds(child.pid), starting=starting):
                logger.error("%s is frozen: no sign of life for %.0f s", child.name, child.pulse.silent_seconds)
                child.pulse = Pulse()
                self._system.kill(child.pid, signal.SIGKILL)

    def _on_end(self, child: Child, code: int) -> None:
        child.ever_ran |= child.is_running()
        child.pid = None
        child.on_death()
        if self._kill_at is not None:
            return
        now = self._system.now()
        if code == TRY_AGAIN:
            if not child.spare:
                child.on_restart()
            child.start_at = now
            return
        if child.spare:
            return
        how = f"signal {-code}" if code < 0 else f"code {code}"
        if not child.ever_ran:
            logger.critical("%s ended with %s before it was ready", child.name, how)
            self._drain(exit_code=1)
            return
        if now - child.started > _LONG_LIFE:
            child.delay, child.failures = 0.0, 0
        child.failures = child.failures + 1 if code > 0 else 0
        if child.failures > _MOST_FAILED_RESTARTS:
            restarts = child.failures - 1
            logger.critical("%s ended with %s after each of %d restarts: giving up", child.name, how, restarts)
            self._drain(exit_code=1)
            return
        logger.error("%s ended with %s: starting it again in %g s", child.name, how, child.delay)
        child.on_restart()
        child.start_at = now + child.delay
        child.delay = min(_MAX_DELAY, 2 * child.delay or 1.0)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._kill_at is None:
            if number == signal.SIGHUP and self._on_hang_up():
                return
            logger.info("%s: draining", number.name)
            self._drain(exit_code=0)
        elif number != signal.SIGHUP and not self._hung_up:
            logger.warning("%s again: ending at once", number.name)
            self._exit_code, self._kill_at = 128 + number, self._system.now()
            self._signal(self._children, signal.SIGKILL)
        # SIGHUP comes together with SIGTERM, or twice: see `service.http`.
        self._hung_up = number == signal.SIGHUP

    def _drain(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._kill_at = self._system.now() + self._drain_timeout + _GRACE
        for child in self._children:
            child.start_at = None
        self._on_drain()
        self._signal(self._workers)

    def _has_ended(self) -> bool:
        """Stop the engines after the workers, kill who does not end in time, and return whether all have ended."""
        now = self._system.now()
        assert self._kill_at is not None
        if any(child.pid is not None for child in self._workers):
            if now > self._kill_at:
                self._signal(self._children, signal.SIGKILL)
            return False
        if any(child.pid is not None for child in self._engines):
            if self._kill_at <= now:
                self._signal(self._engines, signal.SIGKILL)
            else:
                self._signal(self._engines)
                self._kill_at = min(self._kill_at, now + _GRACE)
            return False
        return True

    def _signal(self, children: Sequence[Child], number: signal.Signals | None = None) -> None:
        """Send the running children a signal; by default that which ends the child in order."""
        for child in children:
            if child.pid is not None:
                self._system.kill(child.pid, number or child.stop)
