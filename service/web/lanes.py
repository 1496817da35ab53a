"""Threads for CPU work beside the event loop: a lane each for pictures of moderate size, documents and drawings.

One kind of work never holds the threads of another: a drawing of two seconds waits for other drawings. Work whose time
is up or whose caller has left is dropped while it waits. What a thread is at runs to its end, which is never far.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from service.errors import DeadlineExceeded, EngineUnavailable, QueueFull
from service.priority import lower_priority, seconds_without_core

T = TypeVar("T")

LARGE = 2000
"""Values from which on a document is read or written by a thread: they would hold the event loop for 5 to 10 ms."""

_STUCK_SECONDS = 15.0
"""No work takes a tenth of this. Time for which the thread waits for a core does not count."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The reading `at` of the monotonic `clock`, seconds, at which a request's time is up."""

    at: float
    clock: Callable[[], float] = time.monotonic

    def remaining(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self.at - self.clock())


class _Job(Generic[T]):
    """Work in a pool's queue, which keeps what was cancelled until a thread comes to it: the picture goes before.

    Attributes:
        thread: the native id of the thread that is at it.
        began: the reading of the clock when it began, less the time for which the thread had waited for a core.
    """

    def __init__(self, work: Callable[[], T], deadline: Deadline) -> None:
        self.work: Callable[[], T] | None = work
        self.deadline = deadline
        self.thread: int | None = None
        self.began = 0.0

    def __call__(self) -> T:
        work, self.work = self.work, None
        if self.deadline.remaining() == 0.0:
            raise DeadlineExceeded("the time was up before a thread was free")
        assert work is not None, "a job runs once, and is not dropped before"
        thread = threading.get_native_id()
        self.began = time.monotonic() - seconds_without_core(thread)
        self.thread = thread
        return work()

    def seconds(self) -> float:
        """Return for how long a thread has been at it."""
        return 0.0 if self.thread is None else time.monotonic() - seconds_without_core(self.thread) - self.began


class Lane:
    """Threads that do one kind of work, in the order in which it came.

    Args:
        capacity: jobs that wait or run at once; None: as many as the service has places.
        background: leave the processor to every other thread that wants it (Linux).
    """

    def __init__(self, name: str, threads: int, *, capacity: int | None = None, background: bool = False) -> None:
        self.pool = ThreadPoolExecutor(
            threads, thread_name_prefix=name, initializer=lower_priority if background else None
        )
        self._background = background
        self._jobs: set[_Job[object]] = set()
        self._name = name
        self._capacity = capacity

    @property
    def outstanding(self) -> int:
        """Return how many jobs wait or run."""
        return len(self._jobs)

    async def run(self, work: Callable[[], T], deadline: Deadline) -> T:
        """Run work on one of the threads and return its result.

        The call ends only after the thread has let go of the picture, so that its place in the service is not given
        to another before. What is in the background may take longer, and is left to itself.

        Raises:
            QueueFull: `capacity` is reached.
            DeadlineExceeded: the time was up before the work was done.
            Exception: what the work raises.
        """
        if self._capacity is not None and self.outstanding >= self._capacity:
            raise QueueFull(f"all {self._capacity} places of the {self._name} threads are taken")
        job: _Job[T] = _Job(work, deadline)
        submitted = self.pool.submit(job)
        future = asyncio.wrap_future(submitted)
        self._jobs.add(job)  # type: ignore[arg-type]
        future.add_done_callback(lambda done: self._ended(job, done))
        try:
            await asyncio.wait((future,), timeout=deadline.remaining())
            if not future.done():
                raise DeadlineExceeded(f"the time was up before one of the {self._name} threads was done")
        finally:
            if submitted.cancel():  # no thread has begun it
                job.work = None
            elif not self._background:
                await asyncio.wait((future,))
        return future.result()

    def _ended(self, job: _Job[T], future: asyncio.Future[T]) -> None:
        self._jobs.discard(job)
        if not future.cancelled():
            future.exception()  # seen, though perhaps nobody asks for it any more

    def check(self) -> None:
        """Raise `EngineUnavailable` if a thread has been at one job for so long that it will hardly end."""
        if any(job.seconds() >= _STUCK_SECONDS for job in self._jobs):
            raise EngineUnavailable(f"one of the {self._name} threads has been at one job for {_STUCK_SECONDS:g} s")

    async def run_large(self, work: Callable[[], T], deadline: Deadline, *, size: int) -> T:
        """Run work on one of the threads if it handles many values, else here; raises what `run` raises."""
        if size < LARGE:
            return work()
        found: list[
            T
        ] = []  # a future is in a circle with its callbacks, and keeps its result until the collector comes by
        await self.run(lambda: found.append(work()), deadline)
        return found.pop()

    def close(self) -> None:
        """Drop what waits and take nothing more, without waiting for the threads."""
        self.pool.shutdown(wait=False, cancel_futures=True)
