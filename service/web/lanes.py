"""One fair queue before everything that is scarce: threads, decoder processes, the text tower,
explanations.

    enter() --> waits behind its own caller's jobs --> turn of the caller that has had least -->
    works --> leaves

    in time    a job that cannot begin before its deadline, with the work ahead at its measured cost, is refused at once
    fair       callers have their turns by the seconds of work that they have had: a caller delays itself first
    dropped    a job whose caller leaves or whose time is up while it waits is never begun

`FairQueue` decides, and knows neither threads nor asyncio. Start-time fair queuing: Goyal, Vin and
Cheng 1996, https://doi.org/10.1145/248156.248171.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from queue import SimpleQueue
from typing import Any, Final, Generic, Self, TypeVar

from service.background import supervised_thread
from service.errors import DeadlineExceeded, QueueFull

T = TypeVar("T")

# Share of the measured cost that stays with each further job: about the last 50 jobs count.
_DECAY: Final = 0.98
# Callers that are remembered, before those are forgotten that have no job now.
_MOST_SHARES: Final = 4096


@dataclass(frozen=True, slots=True)
class Deadline:
    """The reading `at` of the monotonic `clock`, seconds, at which a request's time is up."""

    at: float
    clock: Callable[[], float] = time.monotonic

    def remaining(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self.at - self.clock())


class Entry:
    """A job in a queue.

    Attributes:
        size: in any unit that its cost grows with, the same for all jobs of a queue.
        deadline: reading of the clock before which it must begin.
        is_waiting, is_under_way: its state; neither before it is added, and once it is gone.
        began: reading of the clock at which it began.
        charged: seconds of work that its caller is charged for it.
    """

    share: "_Share[Any]"

    @property
    def delays_own(self) -> bool:
        """Return whether other jobs of its caller wait."""
        return bool(self.share.waiting)

    def __init__(self, size: float, deadline: float) -> None:
        self.size = size
        self.deadline = deadline
        self.is_waiting = self.is_under_way = False
        self.began = self.charged = 0.0


E = TypeVar("E", bound=Entry)


@dataclass(slots=True, eq=False)
class _Share(Generic[E]):
    """The part of one caller: seconds of work that it has had, on a scale that all callers share,
    and what waits.
    """

    used: float
    waiting: deque[E] = field(default_factory=deque)
    size: float = 0.0
    under_way: int = 0
    turn: int = -1


class FairQueue(Generic[E]):
    """Jobs that wait for one of several servers, in turns by caller.

    The cost of a job is its size times the measured seconds of work for a unit of size, until it
    has worked; then its caller is charged the seconds that it took.

    Args:
        servers: returns how many jobs may be under way.
        clock: monotonic seconds.
        each: how many of those may be one caller's.
    """

    def __init__(
        self, servers: Callable[[], int], clock: Callable[[], float], each: float = math.inf
    ) -> None:
        self._servers = servers
        self._clock = clock
        self._each = each
        self._shares: dict[Hashable, _Share[E]] = {}
        self._turns: list[tuple[float, int, _Share[E]]] = []
        self._numbers = count()
        self._now = 0.0  # what the caller had used whose job began last
        self.waiting = 0
        self.under_way = 0
        self._size_waiting, self._size_under_way = 0.0, 0.0
        self._sizes, self._worked, self._held = 0.0, 0.0, 0.0

    def add(self, entry: E, caller: Hashable) -> None:
        """Let a job of a caller wait; raises `QueueFull` if it cannot begin before its deadline."""
        share = self._share(caller)
        begins = (
            share.under_way < self._each < math.inf
            and self.under_way < self._servers()
            and not share.waiting
        )
        if (
            self.waiting
            and not begins
            and self._wait(share, remaining := entry.deadline - self._clock()) > remaining
        ):
            raise QueueFull("the work that is ahead takes longer than the request's time")
        entry.share, entry.is_waiting = share, True
        share.waiting.append(entry)
        share.size += entry.size
        self._size_waiting += entry.size
        self.waiting += 1
        if len(share.waiting) == 1:
            self._line_up(share)

    def begin(self) -> E | None:
        """Return the job that begins now, None if none waits or no server is free; drop those that
        are too late.
        """
        while self._turns and self.waiting and self.under_way < self._servers():
            _, turn, share = heappop(self._turns)
            if (
                turn != share.turn or share.under_way >= self._each
            ):  # charged since, without a job, or with too many
                continue
            entry = share.waiting[0]
            self._remove(entry)
            if entry.deadline <= self._clock():
                self._line_up(share)
                continue
            self._now = max(self._now, share.used)
            entry.is_under_way, entry.began = True, self._clock()
            self.under_way += 1
            share.under_way += 1
            self._size_under_way += entry.size
            self.charge(entry, entry.size * self._pace)
            return entry
        return None

    def charge(self, entry: E, seconds: float) -> None:
        """Charge the caller of a job that is under way the seconds of work that it took."""
        entry.share.used += seconds - entry.charged
        entry.charged = seconds
        self._line_up(entry.share)

    def leave(self, entry: E, *, worked: bool = True) -> None:
        """Give back the server of a job, or drop it while it waits; a job that is gone stays so.

        One that has not `worked` tells nothing of what others take.
        """
        if entry.is_waiting:
            self._remove(entry)
            self._line_up(entry.share)
        elif entry.is_under_way:
            entry.is_under_way = False
            if worked:
                self._sizes = self._sizes * _DECAY + entry.size
                self._worked = self._worked * _DECAY + entry.charged
                self._held = self._held * _DECAY + self._clock() - entry.began
            entry.share.under_way -= 1
            self.under_way -= 1
            self._size_under_way -= entry.size
            self._line_up(entry.share)

    @property
    def is_crowded(self) -> bool:
        """Return whether jobs wait though their callers may begin another one."""
        return self.waiting > 0 and self.under_way >= self._servers()

    @property
    def _pace(self) -> float:
        """Return the measured seconds of work for a unit of size."""
        return self._worked / self._sizes if self._sizes else 0.0

    @property
    def _hold(self) -> float:
        """Return the measured seconds that a server is held for a unit of size."""
        return self._held / self._sizes if self._sizes else 0.0

    def _seconds(self, ahead: float) -> float:
        """Return the seconds until waiting jobs of this size, and half of those under way, have
        left.
        """
        return (ahead + self._size_under_way / 2) * self._hold / max(1, self._servers())

    def _wait(self, share: _Share[E], bound: float) -> float:
        """Return the seconds until a further job of a caller would begin, or some seconds above or
        below `bound`.
        """
        own = share.size * self._hold / self._each
        # What all jobs together take is known at once; what is ahead of one is counted only where
        # that is too long.
        if own > bound or self._seconds(self._size_waiting) <= bound:
            return own
        pace = self._pace or 1e-9
        turn = share.used + share.size * pace
        others = (other for other in self._shares.values() if other.waiting and other is not share)
        ahead = sum(min(other.size, max(0.0, turn - other.used) / pace) for other in others)
        return self._seconds(share.size + ahead)

    def _share(self, caller: Hashable) -> _Share[E]:
        share = self._shares.get(caller)
        if share is None:
            if len(self._shares) >= _MOST_SHARES:
                busy = {
                    name: each
                    for name, each in self._shares.items()
                    if each.waiting or each.under_way
                }
                self._shares = busy
            share = self._shares[caller] = _Share(self._now)
        elif not share.waiting:
            share.used = max(share.used, self._now)
        return share

    def _line_up(self, share: _Share[E]) -> None:
        if share.waiting:
            share.turn = next(self._numbers)
            heappush(self._turns, (share.used, share.turn, share))

    def _remove(self, entry: E) -> None:
        share = entry.share
        entry.is_waiting = False
        share.waiting.remove(entry)
        share.size -= entry.size
        self._size_waiting -= entry.size
        self.waiting -= 1
        share.turn = -1


class Job(Entry, Generic[T]):
    """Work of one caller in a lane, or its turn there.

    A context manager: leaving it gives its server back, or drops it while it waits. Awaited, it
    returns what its work returns, or None once it is its turn.
    """

    def __init__(
        self,
        size: float,
        deadline: float,
        work: Callable[[], T] | None,
        leave: "Callable[[Job[Any]], object]",
    ) -> None:
        super().__init__(size, deadline)
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.on_thread = self.works = self.left = False
        self.is_turn = work is None
        self.work = work
        self._leave = leave

    def __await__(self) -> Generator[Any, None, T]:
        return self.future.__await__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Give the server back, or drop the job while it waits."""
        self.left = True
        if self.timer is not None:
            self.timer.cancel()
        if not self.future.cancel() and not self.future.cancelled():
            self.future.exception()  # seen, though nobody asks for it
        self._leave(self)


class Lane:
    """Turns at something scarce, for callers on one event loop at a time: a job awaits its turn and
    then works.

    Where the lane has threads, it can do the work itself. A thread finishes what it has begun.

    Args:
        name: what jobs wait for, in messages to callers.
        servers: returns how many jobs may have begun and not been left; None: a job leaves with its
        thread.
        threads: how many there are.
        clock: monotonic seconds.
        each: how many of a caller's jobs may have begun and not been left.
    """

    def __init__(
        self,
        name: str,
        servers: Callable[[], int] | None = None,
        *,
        threads: int = 0,
        clock: Callable[[], float] = time.monotonic,
        each: float = math.inf,
    ) -> None:
        self._name = name
        self._clock = clock
        self._leaves_at_once = servers is None
        # Twice as many jobs as there are threads: those that end before the event loop looks have
        # successors.
        self._free = 2 * threads if threads else math.inf
        self._queue: FairQueue[Job[Any]] = FairQueue(servers or (lambda: 2 * threads), clock, each)
        self._ended: list[Callable[[], None]] = []
        self._woken: asyncio.AbstractEventLoop | None = (
            None  # the loop that is about to look at what has ended
        )
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        work = partial(_work_through, self._jobs)
        self._threads = [
            supervised_thread(name, work, name=f"{name}_{number}") for number in range(threads)
        ]
        self._unstarted = list(self._threads)

    @property
    def waiting(self) -> int:
        """Return how many jobs wait."""
        return self._queue.waiting

    @property
    def is_crowded(self) -> bool:
        """Return whether jobs wait because every server is busy, and not only behind their own
        caller's.
        """
        return self._queue.is_crowded

    def turn(self, caller: Hashable, size: float, deadline: Deadline) -> Job[None]:
        """Return a turn that waits; raises `QueueFull` if it cannot begin in time, see
        `FairQueue.add`.

        It costs the seconds that it is held; beside threads, what threads need for work of its
        size. To await it raises `DeadlineExceeded` if its time is up before it begins.
        """
        return self._enter(None, caller, size, deadline)

    def work(
        self, work: Callable[[], T], caller: Hashable, size: float, deadline: Deadline
    ) -> Job[T]:
        """Return the job of a thread, which waits; raises `QueueFull` if it cannot begin in time.

        To await it raises `DeadlineExceeded` if its time is up before it begins, and what the work
        raises.
        """
        return self._enter(work, caller, size, deadline)

    def close(self) -> None:
        """Take nothing more, without waiting for the threads."""
        for _ in self._threads:
            self._jobs.put(None)

    def _enter(
        self, work: Callable[[], T] | None, caller: Hashable, size: float, deadline: Deadline
    ) -> Job[T]:
        job = Job(size, self._clock() + deadline.remaining(), work, self._leave)
        self._queue.add(job, caller)
        self._advance()
        if not job.future.done():
            job.timer = asyncio.get_running_loop().call_later(
                deadline.remaining(), self._give_up, job
            )
        return job

    def _give_up(self, job: Job[Any]) -> None:
        """Drop a job whose time is up before it works."""
        if not (job.works or job.future.done()):
            if not job.on_thread:
                self._queue.leave(job)
            job.future.set_exception(
                DeadlineExceeded(f"the time was up before {self._name} was free")
            )

    def _leave(self, job: Job[Any]) -> None:
        if not job.on_thread:
            if job.is_under_way and job.is_turn and math.isinf(self._free):
                self._queue.charge(job, self._clock() - job.began)
            self._queue.leave(job)
            self._advance()

    def _advance(self) -> None:
        """Begin what can begin; threads start at the loop's next turn, as they compete with this
        one's Python.
        """
        while self._free and (job := self._queue.begin()) is not None:
            if job.future.done():  # its caller is about to leave
                self._queue.charge(job, 0.0)
                self._queue.leave(job, worked=False)
            elif job.is_turn:
                job.future.set_result(None)
            else:
                job.on_thread = True
                self._free -= 1
                loop = asyncio.get_running_loop()
                if self._unstarted:
                    self._unstarted.pop().start()
                loop.call_soon(self._jobs.put, partial(self._run, job, loop))

    def _run(self, job: Job[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Work, on a thread, unless the caller has left or its time is up."""
        began, job.works = self._clock(), not job.future.done()
        work, job.work = job.work, None  # it holds the picture
        outcome = _outcome(work) if job.works else (None, None)
        del work
        with self._lock:
            self._ended.append(partial(self._end, job, outcome, self._clock() - began))
            is_woken, self._woken = self._woken is loop, loop
        if not is_woken:  # else the event loop is about to look
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(self._end_all)

    def _end_all(self) -> None:
        with self._lock:
            ended, self._ended, self._woken = self._ended, [], None
        for end in ended:
            end()
        self._advance()

    def _end(
        self, job: Job[T], outcome: tuple[T | None, BaseException | None], seconds: float
    ) -> None:
        """Publish what a thread made of a job, unless its caller has left."""
        result, error = outcome
        job.on_thread = False
        self._free += 1
        self._queue.charge(job, seconds)
        if self._leaves_at_once or job.left:
            self._queue.leave(job)
        if job.future.done():
            pass
        elif error is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(error)


def _work_through(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    # At the priority of all threads: one with less, that is kept from its core while it has the
    # interpreter, keeps all.
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds what its caller was answered


def _outcome(work: Callable[[], T] | None) -> tuple[T | None, BaseException | None]:
    """Return what the work returns, or what it raises; no frame of the error's traceback holds its
    job.
    """
    assert work is not None, "the jobs of threads have work"
    try:
        return work(), None
    except BaseException as error:  # noqa: BLE001  raised where the job is awaited
        return None, error
