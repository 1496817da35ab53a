"""A fair queue of jobs: the caller that has had the fewest seconds of work is served next.

A caller with many jobs delays its own jobs first. An example with one server and jobs of 100 ms:
caller A has three jobs, and caller B has one. Brackets show the seconds of work of each caller.

    0.00 s    A adds a1, a2 and a3; a1 begins, and A is charged for it (A 0.1)
    0.02 s    B adds b1; B's account starts as A's did when a1 began (A 0.1, B 0.0)
    0.10 s    a1 leaves; b1 begins, because B has had less (A 0.1, B 0.1)
    0.20 s    b1 leaves; a2 begins, and a3 at 0.30 s

A job that cannot begin before its deadline is refused. If b1 had to begin within 0.02 s, it would
be refused at once, because half of a1 takes 0.05 s.

The queue decides, and knows neither threads nor asyncio. Start-time fair queuing: Goyal, Vin and
Cheng 1996, https://doi.org/10.1145/248156.248171.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, Generic, Literal, TypeVar

from service.errors import QueueFull

# Decay of the measured costs per job: they cover about the last 50 jobs.
_DECAY: Final = 0.98
# Above this many callers, callers without a job are forgotten.
_MOST_SHARES: Final = 4096
_LEAST_PACE: Final = 1e-9
# Seconds for which a queue counts as shared after two jobs in a row of different callers.
_SHARED_SECONDS: Final = 1.0
# If jobs hold a server longer than this on average, callers leave room for each other.
_LONG_HOLD_SECONDS: Final = 0.05


class QueuedJob:
    """A job in a queue.

        new --add--> waiting --begin--> under way --leave--> left
                        '-----------leave, or too late--------^

    Attributes:
        size: amount of work, in a unit that all jobs of a queue share.
        deadline: reading of the clock before which the job must begin.
        state: see above.
        began: reading of the clock at which the job began.
        charged: seconds of work that the caller is charged for the job.
    """

    share: "_Share[Any]"

    def __init__(self, size: float, deadline: float) -> None:
        self.size = size
        self.deadline = deadline
        self.state: Literal["new", "waiting", "under way", "left"] = "new"
        self.began = 0.0
        self.charged = 0.0

    @property
    def delays_same_caller(self) -> bool:
        """Return whether other jobs of the same caller wait."""
        return bool(self.share.waiting)


J = TypeVar("J", bound=QueuedJob)


@dataclass(slots=True, eq=False)
class _Share(Generic[J]):
    """The share of one caller.

    Attributes:
        used: seconds of work that the caller has had, on a scale common to all callers.
        waiting: waiting jobs.
        size: sum of the sizes of the waiting jobs.
        under_way: number of jobs under way.
    """

    used: float
    waiting: deque[J] = field(default_factory=deque)
    size: float = 0.0
    under_way: int = 0


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


class FairQueue(Generic[J]):
    """Jobs that wait for one of several servers, in turns by caller.

    The cost of a job is its size times the measured seconds of work for a unit of size. Once the
    job has worked, its caller is charged the seconds that it took.

    `begin`, and `add` while the queue is long, look at each caller with waiting jobs: together
    0.1 ms with 256 callers. A heap would have to be corrected whenever a caller is charged.

    Args:
        servers: returns how many jobs may be under way.
        clock: monotonic seconds.
        per_caller: number of jobs of one caller that may be under way.
        leaves_room: a caller that shares the queue starts a job only while free servers outnumber
            its own jobs. This applies once jobs are long. Use it if the servers are slots in a
            first-in, first-out queue: another caller's job then finds a slot and a short queue.
            See docs/decisions/fairness.md.

    Attributes:
        waiting: number of waiting jobs.
        under_way: number of jobs under way.
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
        self._last_share: _Share[J] | None = None
        self._shared_until = -math.inf
        self._shares: dict[Hashable, _Share[J]] = {}
        # The shares with waiting jobs; of equally used shares, the first is served next.
        self._line: dict[_Share[J], None] = {}
        self._now = 0.0  # seconds used by the caller of the job that began last
        self.waiting = 0
        self.under_way = 0
        self._size_waiting = 0.0
        self._size_under_way = 0.0
        self._costs = _Costs()

    def add(self, job: J, caller: Hashable) -> None:
        """Add a job of a caller; raises `QueueFull` if it cannot begin before its deadline."""
        share = self._share_of(caller)
        if share is not self._last_share:
            if self._last_share is not None:
                self._shared_until = self._clock() + _SHARED_SECONDS
            self._last_share = share
        if self.waiting and not self._begins_at_once(share) and self._is_late(job, share):
            raise QueueFull("the work that is ahead takes longer than the request's time")
        job.share = share
        job.state = "waiting"
        share.waiting.append(job)
        share.size += job.size
        self._size_waiting += job.size
        self.waiting += 1
        self._line[share] = None

    def begin(self) -> J | None:
        """Return the job that begins now, or None if no job can; drop jobs that are too late."""
        while self.waiting and self.under_way < self._servers():
            most = self._most()
            ready = (share for share in self._line if share.under_way < most)
            share = min(ready, key=attrgetter("used"), default=None)
            if share is None:
                return None
            job = share.waiting[0]
            self._remove(job)
            if job.deadline <= self._clock():
                job.state = "left"
                continue
            if share.waiting:
                self._line[share] = self._line.pop(share)
            self._now = max(self._now, share.used)
            job.state = "under way"
            job.began = self._clock()
            self.under_way += 1
            share.under_way += 1
            self._size_under_way += job.size
            self.charge(job, job.size * self._costs.worked_per_size)
            return job
        return None

    def charge(self, job: J, seconds: float) -> None:
        """Charge the caller of a job that is under way the seconds of work that the job took."""
        job.share.used += seconds - job.charged
        job.charged = seconds

    def leave(self, job: J, *, worked: bool = True) -> None:
        """Give back the server of a job, or drop a waiting job; no effect once the job has left.

        Args:
            worked: whether the job's seconds are charged, and count for the measured cost.
        """
        if job.state == "waiting":
            self._remove(job)
        elif job.state == "under way":
            if worked:
                self._costs.add(job.size, job.charged, self._clock() - job.began)
            else:
                self.charge(job, 0.0)
            job.share.under_way -= 1
            self.under_way -= 1
            self._size_under_way -= job.size
        job.state = "left"

    @property
    def is_crowded(self) -> bool:
        """Return whether jobs wait for a server, and not only behind their caller's own jobs."""
        return self.waiting > 0 and self.under_way >= self._servers()

    def _begins_at_once(self, share: _Share[J]) -> bool:
        """Return whether a new job of a caller begins at once, although other jobs wait.

        That is so if the waiting jobs are of callers at their limit.
        """
        return (
            share.under_way < self._most() < math.inf
            and self.under_way < self._servers()
            and not share.waiting
        )

    def _most(self) -> float:
        """Return the most jobs that a caller may have under way."""
        is_long = self._costs.held_per_job >= _LONG_HOLD_SECONDS
        if not self._leaves_room or not is_long or self._clock() >= self._shared_until:
            return self._per_caller
        return min(self._per_caller, max(1, self._servers() - self.under_way))

    def _is_late(self, job: J, share: _Share[J]) -> bool:
        """Return whether a further job of a caller would begin after its deadline.

        Counting all waiting jobs as ahead would be simpler, but during another caller's flood it
        refused 329 of 400 jobs that could begin in time.

        Two costs per unit of size appear here. Seconds of work order the callers, because callers
        are charged for work. Seconds for which a server is held tell when a server is free.
        """
        remaining = job.deadline - self._clock()
        servers_of_caller = max(share.under_way, self._most())
        if share.size * self._costs.held_per_size / servers_of_caller > remaining:
            return True
        if self._seconds(self._size_waiting) <= remaining:
            return False  # even if all waiting jobs were ahead
        pace = self._costs.worked_per_size or _LEAST_PACE
        used_at_begin = share.used + share.size * pace
        size_ahead = share.size + sum(
            min(other.size, (used_at_begin - other.used) / pace)
            for other in self._line
            if other.used < used_at_begin and other is not share
        )
        return self._seconds(size_ahead) > remaining

    def _seconds(self, size_ahead: float) -> float:
        """Return the seconds until jobs of this size, and half of those under way, have left."""
        size = size_ahead + self._size_under_way / 2
        return size * self._costs.held_per_size / max(1, self._servers())

    def _share_of(self, caller: Hashable) -> _Share[J]:
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

    def _remove(self, job: J) -> None:
        """Remove a waiting job."""
        share = job.share
        share.waiting.remove(job)
        share.size -= job.size
        self._size_waiting -= job.size
        self.waiting -= 1
        if not share.waiting:
            del self._line[share]
