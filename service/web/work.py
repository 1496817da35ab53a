"""Work of requests: awaited until the caller leaves, side by side, or on threads beside the event loop.

Each kind of CPU work has a pool of threads, so that a drawing of two seconds delays other drawings and nothing else.
Work whose deadline has passed or whose caller has left is dropped while it waits. A thread finishes what it has begun.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.types import Receive

from service.errors import ClientDisconnected, DeadlineExceeded, EngineUnavailable, QueueFull
from service.priority import lower_priority, seconds_without_core

T = TypeVar("T")

LARGE = 2000
"""Values from which on a document is read or written by a thread: it would hold the event loop for 5 to 10 ms."""

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


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side and return their results, in order.

    When a coroutine fails, the others are cancelled. Its error is raised after they have ended, because until then
    they hold memory of the request.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except ExceptionGroup as failed:
        failed.__traceback__ = None  # a frame of it holds the group itself, and the tasks with all that they were given
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def unless_disconnected(
    receive: Receive, work: Awaitable[T], caller_left: asyncio.Future[None] | None = None
) -> T:
    """Await `work`; if the caller leaves meanwhile, cancel it and raise `ClientDisconnected`.

    The body that came through `receive` must have been read to its end. `caller_left` is that of the request's
    exchange; it saves a task that asks `receive`, and is not to be used again.
    """
    this, watching, left = asyncio.current_task(), True, False
    assert this is not None, "a request is a task"

    def leave(_: object) -> None:
        nonlocal left
        if watching:
            left = True
            this.cancel()

    watcher = asyncio.ensure_future(_disconnect(receive)) if caller_left is None else caller_left
    watcher.add_done_callback(leave)
    try:
        # The request's permit is released after the work has let go of its memory.
        return await work
    except BaseException:
        if not left or this.cancelling() > 1:
            raise
        watcher.result()  # raises any error of the connection
        raise ClientDisconnected("the caller went away") from None
    finally:
        watching = False
        watcher.remove_done_callback(leave)
        watcher.cancel()
        if left:
            this.uncancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Job(Generic[T]):
    """Work in a pool's queue. The queue keeps a cancelled job until a thread comes to it, but not the job's picture.

    `waiter` is what its caller waits for, until it has ended or its time is up; it has no result.
    `began` is a reading of the clock, less the time for which the `thread` (its native id) had waited for a core.
    """

    def __init__(self, work: Callable[[], T], deadline: Deadline) -> None:
        self.work: Callable[[], T] | None = work
        self.deadline = deadline
        self.waiter: asyncio.Future[None] | None = None
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
        """Return for how long a thread has run it."""
        return 0.0 if self.thread is None else time.monotonic() - seconds_without_core(self.thread) - self.began


class ThreadPool:
    """Threads that do one kind of work, in the order of arrival.

    Args:
        capacity: jobs that wait or run at once; None: as many as the service has places.
        background: leave the processor to every other thread that needs it (Linux).
    """

    def __init__(self, name: str, threads: int, *, capacity: int | None = None, background: bool = False) -> None:
        self.executor = ThreadPoolExecutor(
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
        to another before. A job of a background pool may take longer, and is not awaited.

        Raises `QueueFull`, `DeadlineExceeded`, and what the work raises.
        """
        if self._capacity is not None and self.outstanding >= self._capacity:
            raise QueueFull(f"all {self._capacity} places of the {self._name} threads are taken")
        job: _Job[T] = _Job(work, deadline)
        loop = asyncio.get_running_loop()
        job.waiter = loop.create_future()
        submitted = self.executor.submit(job)
        timer = loop.call_later(deadline.remaining(), self._expire, job)
        self._jobs.add(job)  # type: ignore[arg-type]
        submitted.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(self._ended, job))
        try:
            await job.waiter
        finally:
            timer.cancel()
            if submitted.cancel():  # no thread has begun it
                job.work = None
                self._ended(job)
            elif not (self._background or submitted.done()):
                job.waiter = loop.create_future()
                await job.waiter
            job.waiter = None  # its error would be in a circle with this frame, which holds the picture
        try:
            return submitted.result()
        finally:
            del submitted

    def _expire(self, job: _Job[T]) -> None:
        if job.waiter is not None and not job.waiter.done():
            error = DeadlineExceeded(f"the time was up before one of the {self._name} threads was done")
            job.waiter.set_exception(error)

    def _ended(self, job: _Job[T]) -> None:
        self._jobs.discard(job)
        if job.waiter is not None and not job.waiter.done():
            job.waiter.set_result(None)

    def check(self) -> None:
        """Raise `EngineUnavailable` if a thread has been at a job for so long that it will hardly end."""
        if any(job.seconds() >= _STUCK_SECONDS for job in self._jobs):
            raise EngineUnavailable(f"one of the {self._name} threads has been at one job for {_STUCK_SECONDS:g} s")

    async def run_large(self, work: Callable[[], T], deadline: Deadline, *, size: int) -> T:
        """Run work on one of the threads if it handles many values, else here; raises what `run` raises."""
        if size < LARGE:
            return work()
        return await self.run(work, deadline)

    def close(self) -> None:
        """Drop what waits and take nothing more, without waiting for the threads."""
        self.executor.shutdown(wait=False, cancel_futures=True)
