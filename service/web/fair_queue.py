"""A fair queue of jobs: callers have turns by the seconds of work that they have had.

A caller with many jobs delays its own jobs first. A job that cannot begin before its deadline is
refused. The queue decides, and knows neither threads nor asyncio.

Start-time fair queuing: Goyal, Vin and Cheng 1996, https://doi.org/10.1145/248156.248171.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final, Generic, TypeVar

from service.errors import QueueFull

# Share of the measured cost that each further job keeps: about the last 50 jobs count.
_DECAY: Final = 0.98
# Number of known callers from which callers without a job are forgotten.
_MOST_SHARES: Final = 4096
_LEAST_PACE: Final = 1e-9
# Seconds for which a queue counts as shared after two jobs in a row of different callers.
_SHARED_SECONDS: Final = 1.0
# Mean seconds that jobs hold a server, from which on callers leave room for each other.
_LONG_HOLD_SECONDS: Final = 0.05


class QueuedJob:
    """A job in a queue.

    Attributes:
        size: in any unit that its cost grows with, the same for all jobs of a queue.
        deadline: reading of the clock before which the job must begin.
        is_waiting: whether the job waits.
        is_under_way: whether the job has begun and not left.
        began: reading of the clock at which the job began.
        charged: seconds of work that the caller is charged for the job.
    """

    share: "_Share[Any]"

    def __init__(self, size: float, deadline: float) -> None:
        self.size = size
        self.deadline = deadline
        self.is_waiting = False
        self.is_under_way = False
        self.began = 0.0
        self.charged = 0.0

    @property
    def delays_own(self) -> bool:
        """Return whether other jobs of the same caller wait."""
        return bool(self.share.waiting)


E = TypeVar("E", bound=QueuedJob)


@dataclass(slots=True, eq=False)
class _Share(Generic[E]):
    """The share of one caller.

    Attributes:
        used: seconds of work that the caller has had, on a scale common to all callers.
        waiting: waiting jobs.
        size: sum of the sizes of the waiting jobs.
        under_way: number of jobs under way.
        turn: number of its turn in the line; an entry of the line with another number is stale.
    """

    used: float
    waiting: deque[E] = field(default_factory=deque)
    size: float = 0.0
    under_way: int = 0
    turn: int = -1


class _Costs:
    """The measured costs of jobs: decaying sums over the jobs that have worked."""

    def __init__(self) -> None:
        self._jobs = 0.0
        self._sizes = 0.0
        self._worked_seconds = 0.0
        self._held_seconds = 0.0

    def add(self, size: float, worked_seconds: float, held_seconds: float) -> None:
        """Add a job that has worked."""
        self._jobs = self._jobs * _DECAY + 1
        self._sizes = self._sizes * _DECAY + size
        self._worked_seconds = self._worked_seconds * _DECAY + worked_seconds
        self._held_seconds = self._held_seconds * _DECAY + held_seconds

    @property
    def worked_per_size(self) -> float:
        """Return the seconds of work for a unit of size."""
        return self._worked_seconds / self._sizes if self._sizes else 0.0

    @property
    def held_per_size(self) -> float:
        """Return the seconds for which a server is held per unit of size."""
        return self._held_seconds / self._sizes if self._sizes else 0.0

    @property
    def held_per_job(self) -> float:
        """Return the seconds for which a server is held per job, infinite before the first job."""
        return self._held_seconds / self._jobs if self._jobs else math.inf


class FairQueue(Generic[E]):
    """Jobs that wait for one of several servers, in turns by caller.

    The cost of a job is its size times the measured seconds of work for a unit of size. Once the
    job has worked, its caller is charged the seconds that it took.

    Args:
        servers: returns how many jobs may be under way.
        clock: monotonic seconds.
        per_caller: number of jobs of one caller that may be under way.
        leaves_room: a caller that shares the queue starts a job only while free servers outnumber
            its own jobs. This applies once jobs are long. Use it if the servers are slots in a
            first-in, first-out queue: another caller's job then finds a slot and a short queue.
            See docs/decisions/fairness.md.
    """

    def __init__(
        self,
        servers: Callable[[], int],
        clock: Callable[[], float],
        per_caller: float = math.inf,
        *,
        leaves_room: bool = False,
    ) -> None:
        self._servers = servers
        self._clock = clock
        self._per_caller = per_caller
        self._leaves_room = leaves_room
        self._last_share: _Share[E] | None = None
        self._shared_until = -math.inf
        self._shares: dict[Hashable, _Share[E]] = {}
        self._line: list[tuple[float, int, _Share[E]]] = []
        self._numbers = count()
        self._now = 0.0  # seconds used by the caller of the job that began last
        self.waiting = 0
        self.under_way = 0
        self._size_waiting = 0.0
        self._size_under_way = 0.0
        self._costs = _Costs()

    def add(self, entry: E, caller: Hashable) -> None:
        """Add a job of a caller; raises `QueueFull` if it cannot begin before its deadline."""
        share = self._share(caller)
        self._note_turn_of(share)
        if self.waiting and not self._begins_at_once(share):
            remaining = entry.deadline - self._clock()
            if self._wait(share, remaining) > remaining:
                raise QueueFull("the work that is ahead takes longer than the request's time")
        entry.share = share
        entry.is_waiting = True
        share.waiting.append(entry)
        share.size += entry.size
        self._size_waiting += entry.size
        self.waiting += 1
        if len(share.waiting) == 1:
            self._line_up(share)

    def begin(self) -> E | None:
        """Return the job that begins now, or None if no job can; drop jobs that are too late."""
        while self._line and self.waiting and self.under_way < self._servers():
            _, turn, share = heappop(self._line)
            if turn != share.turn or share.under_way >= self._most():
                continue
            entry = share.waiting[0]
            self._remove(entry)
            if entry.deadline <= self._clock():
                self._line_up(share)
                continue
            self._now = max(self._now, share.used)
            entry.is_under_way = True
            entry.began = self._clock()
            self.under_way += 1
            share.under_way += 1
            self._size_under_way += entry.size
            self.charge(entry, entry.size * self._costs.worked_per_size)
            return entry
        return None

    def charge(self, entry: E, seconds: float) -> None:
        """Charge the caller of a job that is under way the seconds of work that the job took."""
        entry.share.used += seconds - entry.charged
        entry.charged = seconds
        self._line_up(entry.share)

    def leave(self, entry: E, *, worked: bool = True) -> None:
        """Give back the server of a job, or drop a waiting job; no effect once the job has left.

        Args:
            worked: whether the job's seconds count for the measured cost.
        """
        if entry.is_waiting:
            self._remove(entry)
            self._line_up(entry.share)
        elif entry.is_under_way:
            entry.is_under_way = False
            if worked:
                self._costs.add(entry.size, entry.charged, self._clock() - entry.began)
            entry.share.under_way -= 1
            self.under_way -= 1
            self._size_under_way -= entry.size
            self._line_up(entry.share)

    @property
    def is_crowded(self) -> bool:
        """Return whether jobs wait for a server, and not only behind their caller's own jobs."""
        return self.waiting > 0 and self.under_way >= self._servers()

    def _begins_at_once(self, share: _Share[E]) -> bool:
        """Return whether a job of a caller begins before all others.

        Only in a queue with a limit per caller can a server be free while jobs wait.
        """
        return (
            share.under_way < self._most() < math.inf
            and self.under_way < self._servers()
            and not share.waiting
        )

    def _note_turn_of(self, share: _Share[E]) -> None:
        """Note whether callers share the queue, when a job of one of them arrives."""
        if share is self._last_share:
            return
        if self._last_share is not None:
            self._shared_until = self._clock() + _SHARED_SECONDS
        self._last_share = share

    def _most(self) -> float:
        """Return the most jobs that a caller may have under way."""
        is_long = self._costs.held_per_job >= _LONG_HOLD_SECONDS
        if not self._leaves_room or not is_long or self._clock() >= self._shared_until:
            return self._per_caller
        return min(self._per_caller, max(1, self._servers() - self.under_way))

    def _wait(self, share: _Share[E], bound: float) -> float:
        """Return the seconds until a further job of a caller would begin.

        Two costs per unit of size appear here. Seconds of work order the callers, because callers
        are charged for work. Seconds for which a server is held tell when a server is free.

        The result is exact only near `bound`: the jobs ahead are counted one by one only if all
        waiting jobs together would take longer.
        """
        servers_of_caller = max(share.under_way, self._most())
        seconds_of_caller = share.size * self._costs.held_per_size / servers_of_caller
        if seconds_of_caller > bound or self._seconds(self._size_waiting) <= bound:
            return seconds_of_caller
        pace = self._costs.worked_per_size or _LEAST_PACE
        turn = share.used + share.size * pace
        size_ahead = share.size
        for other in self._shares.values():
            if other.waiting and other is not share:
                size_ahead += min(other.size, max(0.0, turn - other.used) / pace)
        return self._seconds(size_ahead)

    def _seconds(self, size_ahead: float) -> float:
        """Return the seconds until jobs of this size, and half of those under way, have left."""
        size = size_ahead + self._size_under_way / 2
        return size * self._costs.held_per_size / max(1, self._servers())

    def _share(self, caller: Hashable) -> _Share[E]:
        share = self._shares.get(caller)
        if share is None:
            if len(self._shares) >= _MOST_SHARES:
                self._shares = {
                    name: other
                    for name, other in self._shares.items()
                    if other.waiting or other.under_way
                }
            share = _Share(self._now)
            self._shares[caller] = share
        elif not share.waiting:
            share.used = max(share.used, self._now)
        return share

    def _line_up(self, share: _Share[E]) -> None:
        if share.waiting:
            share.turn = next(self._numbers)
            heappush(self._line, (share.used, share.turn, share))

    def _remove(self, entry: E) -> None:
        share = entry.share
        entry.is_waiting = False
        share.waiting.remove(entry)
        share.size -= entry.size
        self._size_waiting -= entry.size
        self.waiting -= 1
        share.turn = -1
