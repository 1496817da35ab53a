"""An operating system for a supervisor: its clock goes on only while the supervisor waits."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from service.extensions.cluster.processes import SERVING, Link, OperatingSystem, Report
from service.extensions.cluster.supervisor import Child

START = 1000.0
MOST_TURNS = 1000
"""More turns than any test needs: a supervisor that takes them spins."""


class FakeLink(Link):
    """A pipe from a process of a `FakeSystem`, which always has something to say unless it is
    silent.
    """

    def __init__(self, system: FakeSystem, name: str) -> None:
        self._system = system
        self._name = name

    def receive(self) -> list[Report]:
        system = self._system
        name = self._name
        if name not in system.alive.values() or name in system.silent:
            return []
        return [Report(SERVING if name in system.serving else 0)]


@dataclass
class FakeSystem(OperatingSystem):
    """See `OperatingSystem`.

    Attributes:
        alive: name of each process by its pid.
        spawned: (seconds, name) of each start.
        sent: (seconds, name, signal) of each signal that was sent.
        serving: names of the processes that report that they serve.
        stubborn: names of the processes that only SIGKILL ends.
        silent: names of the processes whose event loop does not beat.
        turns: how often the supervisor has waited.
    """

    time: float = START
    alive: dict[int, str] = field(default_factory=dict)
    spawned: list[tuple[float, str]] = field(default_factory=list)
    sent: list[tuple[float, str, signal.Signals]] = field(default_factory=list)
    serving: set[str] = field(default_factory=lambda: {"engine", "worker 0", "worker 1"})
    stubborn: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    turns: int = 0
    _events: list[tuple[float, Callable[[], list[int]]]] = field(default_factory=list)
    _ended: list[tuple[int, int]] = field(default_factory=list)

    # What happens, and when.

    def at(self, seconds: float, event: Callable[[], list[int]]) -> None:
        """Let something happen; it returns the signals that the supervisor gets from it."""
        self._events.append((START + seconds, event))
        self._events.sort(key=lambda entry: entry[0])

    def signal_at(self, seconds: float, number: signal.Signals) -> None:
        self.at(seconds, lambda: [number])

    def freezes(self, name: str) -> Callable[[], list[int]]:
        """An event: a process stops, as SIGSTOP does; its successor is well."""

        def event() -> list[int]:
            self.silent.add(name)
            return []

        return event

    def thaws(self, name: str) -> Callable[[], list[int]]:
        """An event: a process goes on again."""

        def event() -> list[int]:
            self.silent.discard(name)
            return []

        return event

    def end_at(self, seconds: float, name: str, code: int = 1) -> None:
        self.at(seconds, lambda: self._end(name, code))

    def _end(self, name: str, code: int) -> list[int]:
        [pid] = [pid for pid, other in self.alive.items() if other == name]
        del self.alive[pid]
        self.silent.discard(name)
        self._ended.append((pid, code))
        return [signal.SIGCHLD]

    # The supervisor's side.

    def now(self) -> float:
        return self.time

    def spawn(self, name: str, main: Callable[[], int]) -> int:
        assert name not in self.alive.values()
        pid = 100 + len(self.spawned)
        self.spawned.append((self.time - START, name))
        self.alive[pid] = name
        return pid

    def kill(self, pid: int, number: signal.Signals) -> None:
        name = self.alive[pid]
        self.sent.append((self.time - START, name, number))
        if number == signal.SIGKILL:
            self._events.insert(
                0,
                (self.time, lambda: self._end(name, -signal.SIGKILL) if pid in self.alive else []),
            )
        elif name not in self.stubborn:
            self._events.insert(
                0, (self.time, lambda: self._end(name, 0) if pid in self.alive else [])
            )

    def wait(self, seconds: float, links: Sequence[Link]) -> list[int]:
        assert 0 <= seconds <= 1
        self.turns += 1
        assert self.turns < MOST_TURNS, "the supervisor spins"
        if self._events and self._events[0][0] <= self.time + seconds:
            time, event = self._events.pop(0)
            self.time = max(self.time, time)
            return event()
        self.time += seconds
        return []

    def reap(self) -> list[tuple[int, int]]:
        ended = self._ended
        self._ended = []
        return ended

    def starts_of(self, child: Child) -> list[float]:
        """Return the times at which a child was started."""
        return [seconds for seconds, name in self.spawned if name == child.name]

    def sent_to(self, name: str) -> list[tuple[float, signal.Signals]]:
        """Return the first time of each signal to a process, as (seconds, signal)."""
        first: dict[signal.Signals, float] = {}
        for seconds, receiver, number in self.sent:
            if receiver == name:
                first.setdefault(number, seconds)
        return [(seconds, number) for number, seconds in first.items()]
