"""Starts a service's processes, starts them again when they die, and ends them in order.

    supervisor -- forks --> engine 0 ... (one a device), worker 0 ... (web)

* A child that dies is started again, at once the first time, then after a delay that doubles up to
  `_MAX_DELAY`; a child that lived for `_LONG_LIFE` begins anew. Meanwhile the others go on: workers
  answer 503 when no engine is left, and connections of a worker wait for its successor.
* A child whose event loop gives no sign for `_MOST_SILENT_LOOKS` is frozen, and killed.
* A child that ends before it ever ran ends the service with 1: what cannot start will not start by itself. So does one
  that was started again `_MOST_RESTARTS` times in a row and then fails: a GPU that is lost inside
  of a container comes back in a new container only. What a signal ends has not failed.
* A child that ends with `TRY_AGAIN` is started again at once, whether it ever ran or not: it has reported the
  option that its successor is to change.
* SIGTERM, SIGINT or SIGHUP: the workers drain, then the engines end, exit code 0. A second SIGTERM or SIGINT ends
  all at once. SIGHUP does so only if `on_hang_up` has not done what it asks for.
* When the supervisor itself is killed, the kernel kills its children.

The supervisor is a plain loop without threads or an event loop. So it can fork at any time, and
little in it can fail.
"""

import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from service.extensions.cluster.processes import RUNNING, Link, OperatingSystem, Report
from service.lifecycle import log_end

logger = logging.getLogger("vitserve")

# Exit code of a child whose successor starts with another option (EX_TEMPFAIL of sysexits.h).
TRY_AGAIN: Final = 75

_MAX_DELAY: Final = 30.0
_MOST_RESTARTS: Final = 5
_LONG_LIFE: Final = 60.0
_GRACE: Final = 5.0
_LONGEST_WAIT: Final = 1.0

# Looks, a second or more apart, between which a process gave no sign. A busy machine delays a
# healthy event loop by seconds; a process that maps a gigabyte of libraries may wait for the disk
# while it holds the interpreter's lock. Time for which the supervisor stood still too, perhaps with
# the whole machine, has no looks.
_MOST_SILENT_LOOKS: Final = 10
_MOST_SILENT_LOOKS_AT_START: Final = 60


@dataclass(eq=False)
class Child:
    """A child process of the supervisor, which may be started again after it died.

    Attributes:
        main: the work of the process; its result is the exit code.
        stop: the signal that ends it in order.
        link: by which it reports.
        state: see `Report`; 0 while it starts.
        options: settings that it starts with instead of those of the service.
        restarts: how often it was started again.
        short_lives: how often in a row it ended soon after its start.
        start_at: when it is to be started; None while it runs or is not to be started any more.
        silent_looks: looks since its last report.
    """

    name: str
    main: "Callable[[Child], int]"
    stop: signal.Signals
    link: Link = field(default_factory=Link)
    state: int = 0
    options: dict[str, str | int] = field(default_factory=dict)
    ever_ran: bool = False
    restarts: int = 0
    pid: int | None = None
    started: float = 0.0
    short_lives: int = 0
    start_at: float | None = 0.0
    silent_looks: int = 0


class Events(Protocol):
    """What a service does when its supervisor has news."""

    def reported(self, report: Report) -> None:
        """Note what a child serves."""

    def ended(self, pid: int) -> None:
        """Clear what a child left behind."""

    def draining(self) -> None:
        """Note that no worker is to be started any more."""

    def hung_up(self) -> bool:
        """Do what SIGHUP asks for, and return whether that was done."""


class Supervisor:
    """Runs a service's processes; the module's text says how.

    Args:
        drain_timeout: seconds within which workers end by themselves.
    """

    def __init__(
        self,
        workers: Sequence[Child],
        engines: Sequence[Child],
        system: OperatingSystem,
        events: Events,
        *,
        drain_timeout: float,
    ) -> None:
        self._workers = workers
        self._engines = engines
        self._children = (*engines, *workers)
        self._system = system
        self._events = events
        self._drain_timeout = drain_timeout
        self._looked_at = 0.0
        self._kill_at: float | None = None
        self._hung_up = False
        self._exit_code = self._answered = self._refused = 0

    def run(self) -> int:
        """Run until every child has ended, and return the exit code of the service."""
        while self._kill_at is None or not self._has_ended():
            self._start_due()
            for received in self._system.wait(
                self._seconds_to_wait(), [child.link for child in self._children]
            ):
                if received in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    self._on_signal(signal.Signals(received))
            for child in self._children:
                self._read_reports(child)
            for pid, code in self._system.reap():
                for child in self._children:
                    if child.pid == pid:
                        self._read_reports(child)  # the last one tells how its successor starts
                        self._events.ended(pid)
                        self._ended(child, code)
            if self._kill_at is None:  # else a child that does not end in time is killed anyway
                self._kill_frozen()
        log_end(self._answered, self._refused)
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
                child.state, child.silent_looks = 0, 0
                child.pid = self._system.spawn(child.name, partial(child.main, child))

    def _read_reports(self, child: Child) -> None:
        for report in child.link.receive():
            child.silent_looks = 0
            child.state = max(child.state, report.state)
            child.ever_ran |= child.state >= RUNNING
            child.options |= report.options
            self._answered += report.answered
            self._refused += report.refused
            if report.state:
                self._events.reported(report)

    def _kill_frozen(self) -> None:
        now = self._system.now()
        if now - self._looked_at < _LONGEST_WAIT:
            return
        self._looked_at = now
        for child in self._children:
            child.silent_looks += 1
            most = _MOST_SILENT_LOOKS if child.state >= RUNNING else _MOST_SILENT_LOOKS_AT_START
            if child.pid is not None and child.silent_looks > most:
                logger.error("%s is frozen: no sign of life for %d s", child.name, most)
                self._system.kill(child.pid, signal.SIGKILL)

    def _ended(self, child: Child, code: int) -> None:
        child.pid, child.state = None, 0
        if self._kill_at is not None:
            return
        now = self._system.now()
        if code == TRY_AGAIN:
            child.restarts += 1
            child.start_at = now
            return
        how = f"signal {-code}" if code < 0 else f"code {code}"
        if not child.ever_ran:
            logger.critical("%s ended with %s before it was ready", child.name, how)
            self._drain(exit_code=1)
            return
        child.short_lives = 1 if now - child.started > _LONG_LIFE else child.short_lives + 1
        if code > 0 and child.short_lives > _MOST_RESTARTS:
            logger.critical(
                "%s ended with %s after %d restarts: giving up", child.name, how, _MOST_RESTARTS
            )
            self._drain(exit_code=1)
            return
        delay = (
            0.0 if child.short_lives == 1 else min(_MAX_DELAY, 2.0 ** min(child.short_lives - 2, 9))
        )
        logger.error("%s ended with %s: starting it again in %g s", child.name, how, delay)
        child.restarts += 1
        child.start_at = now + delay

    def _on_signal(self, number: signal.Signals) -> None:
        if self._kill_at is None:
            if number == signal.SIGHUP and self._events.hung_up():
                return
            logger.info("%s: stopping", number.name)
            self._drain(exit_code=0)
        elif number != signal.SIGHUP and not self._hung_up:
            logger.warning("%s again: ending at once", number.name)
            self._exit_code, self._kill_at = 128 + number, self._system.now()
            self._signal(self._children, signal.SIGKILL)
        # systemd may send SIGHUP together with SIGTERM, and terminals send it twice: both ask for
        # one stop.
        self._hung_up = number == signal.SIGHUP

    def _drain(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._kill_at = self._system.now() + self._drain_timeout + _GRACE
        for child in self._children:
            child.start_at = None
        self._events.draining()
        self._signal(self._workers)

    def _has_ended(self) -> bool:
        """Stop the engines after the workers, kill who does not end in time, and return whether all
        have ended.
        """
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
