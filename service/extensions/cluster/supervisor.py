"""Starts the processes of a service, restarts those that die, and ends them in order.

    supervisor -- forks --> engine 0 ... (one per device), worker 0 ... (web)

* A dead child restarts, at once the first time, and then after a delay that doubles up to
  `_MAX_DELAY`. A life of `_LONG_LIFE` resets the delay. The other children continue: workers answer
  503 without an engine, and a dead worker's connections wait for its successor.
* A child whose event loop is silent for `_MAX_SILENT_CHECKS` is frozen, and gets killed.
* A child that ends before it ever ran ends the service with code 1, because a restart would not
  help. The same applies to a child that fails after `_MAX_RESTARTS` restarts in a row. For
  example, if a container loses its GPU, only a new container gets it back. A child that a signal
  ends has not failed.
* A child that ends with `TRY_AGAIN` restarts at once, even if it never ran. Its last report has the
  option that its successor changes.
* SIGTERM, SIGINT or SIGHUP: the workers drain, and then the engines end, with exit code 0. A second
  SIGTERM or SIGINT ends all at once. SIGHUP has no further effect if `hung_up` handles it.
* If the supervisor itself is killed, the kernel kills its children.

The supervisor is a plain loop without threads or an event loop. Therefore it can fork at any time,
and little of it can fail.
"""

import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from service.draining import log_end
from service.extensions.cluster.processes import RUNNING, Link, OperatingSystem, Report

logger = logging.getLogger("vitserve")

# Exit code of a child whose successor needs another option (EX_TEMPFAIL of sysexits.h).
TRY_AGAIN: Final = 75

_MAX_DELAY: Final = 30.0
_MAX_RESTARTS: Final = 5
_LONG_LIFE: Final = 60.0
_GRACE: Final = 5.0
_LONGEST_WAIT: Final = 1.0

# Limits of checks in a row, at least a second apart, without a report. A busy machine delays a
# healthy event loop by seconds. A process that maps a gigabyte of libraries may wait for the disk
# while it holds the interpreter's lock. The supervisor does not check while it is stopped itself,
# perhaps with the whole machine.
_MAX_SILENT_CHECKS: Final = 10
_MAX_SILENT_CHECKS_AT_START: Final = 60


@dataclass(eq=False)
class Child:
    """A child process of the supervisor, and its restarts.

    Attributes:
        main: work of the process; its result is the exit code.
        stop: signal that ends the process in order.
        link: pipe for its reports.
        state: last reported state, see `Report`; 0 while it starts.
        options: settings that override the service's.
        ever_ran: whether it has ever reported `RUNNING`.
        restarts: number of restarts.
        short_lives: number of short lives in a row.
        start_at: time of the next start; None while it runs or must not start.
        silent_checks: number of checks since its last report.
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
    silent_checks: int = 0


class Events(Protocol):
    """Handlers of a supervisor's events."""

    def reported(self, report: Report) -> None:
        """Note the report of a child."""

    def ended(self, pid: int) -> None:
        """Clean up after a child."""

    def draining(self) -> None:
        """Note that the supervisor starts no further worker."""

    def hung_up(self) -> bool:
        """Handle SIGHUP, and return whether it was handled."""


class Supervisor:
    """Runs a service's processes by the rules of this module.

    Args:
        drain_timeout: seconds after which draining workers are killed.
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
        self._checked_at = 0.0
        self._kill_at: float | None = None
        self._hung_up = False
        self._exit_code = 0
        self._answered = 0
        self._refused = 0

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
                        self._read_reports(child)  # the last report has the successor's options
                        self._events.ended(pid)
                        self._ended(child, code)
            if self._kill_at is None:  # a draining child is killed at the timeout anyway
                self._kill_frozen()
        log_end(self._answered, self._refused)
        return self._exit_code

    def _seconds_to_wait(self) -> float:
        """Return the seconds until the next start of a child, at most `_LONGEST_WAIT`."""
        now = self._system.now()
        due = (child.start_at - now for child in self._children if child.start_at is not None)
        return min(_LONGEST_WAIT, max(0.0, min(due, default=_LONGEST_WAIT)))

    def _start_due(self) -> None:
        for child in self._children:
            now = self._system.now()
            if child.start_at is not None and child.start_at <= now:
                child.started = now
                child.start_at = None
                child.state = 0
                child.silent_checks = 0
                child.pid = self._system.spawn(child.name, partial(child.main, child))

    def _read_reports(self, child: Child) -> None:
        for report in child.link.receive():
            child.silent_checks = 0
            child.state = max(child.state, report.state)
            child.ever_ran |= child.state >= RUNNING
            child.options |= report.options
            self._answered += report.answered
            self._refused += report.refused
            if report.state:
                self._events.reported(report)

    def _kill_frozen(self) -> None:
        now = self._system.now()
        if now - self._checked_at < _LONGEST_WAIT:
            return
        self._checked_at = now
        for child in self._children:
            child.silent_checks += 1
            limit = _MAX_SILENT_CHECKS if child.state >= RUNNING else _MAX_SILENT_CHECKS_AT_START
            if child.pid is not None and child.silent_checks > limit:
                logger.error("%s is frozen: no sign of life for %d s", child.name, limit)
                self._system.kill(child.pid, signal.SIGKILL)

    def _ended(self, child: Child, code: int) -> None:
        child.pid = None
        child.state = 0
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
        if code > 0 and child.short_lives > _MAX_RESTARTS:
            logger.critical(
                "%s ended with %s after %d restarts: giving up", child.name, how, _MAX_RESTARTS
            )
            self._drain(exit_code=1)
            return
        delay = 0.0
        if child.short_lives > 1:
            delay = min(_MAX_DELAY, 2.0 ** min(child.short_lives - 2, 9))
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
            self._exit_code = 128 + number
            self._kill_at = self._system.now()
            self._signal(self._children, signal.SIGKILL)
        # systemd may send SIGHUP together with SIGTERM, and terminals send it twice. Both request
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
        """Stop the engines after the workers, and return whether all children have ended.

        Children that do not end in time are killed.
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
        """Send a signal to running children; by default, each child's stop signal."""
        for child in children:
            if child.pid is not None:
                self._system.kill(child.pid, number or child.stop)
