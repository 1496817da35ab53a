"""Work of requests: awaited until the caller leaves, side by side, or on threads beside the event loop.

Each kind of CPU work has a pool of threads, so that a drawing of two seconds delays other drawings and nothing else.
Work whose deadline has passed or whose caller has left is dropped while it waits. A thread finishes what it has begun.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.types import Receive

from service.errors import ClientDisconnected, DeadlineExceeded, EngineUnavailable, QueueFull
from service.priority import lower_priority, seconds_without_core
from service.timers import Timers

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

    The body that came through `receive` must have been read to its end. `caller_left` is `left` of the request's
    connection; it saves a task that asks `receive`.
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
        if caller_left is None:
            watcher.cancel()
        if left:
            this.uncancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Job(Generic[T]):
    """What becomes of work in a pool. `waiter` is done, without a result, when it has ended or its time is up."""

    def __init__(self, deadline: Deadline, waiter: asyncio.Future[None]) -> None:
        self.waiter: asyncio.Future[None] | None = waiter
        self.loop = waiter.get_loop()
        self.ended = False
        self._deadline = deadline
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread: int | None = None
        self._began = 0.0
        self._waited: float | None = None

    def run(self, work: Callable[[], T]) -> None:
        """Do the work on this thread, unless its time is up."""
        try:
            if self._deadline.remaining() == 0.0:
                raise DeadlineExceeded("the time was up before a thread was free")
            self._began, self._thread = time.monotonic(), threading.get_native_id()
            self._result.append(work())
        except BaseException as error:  # noqa: BLE001  raised where the result is asked for
            self._error = error

    def end(self) -> None:
        """Wake the caller, or let go of the outcome."""
        self.ended = True
        if self.waiter is None:
            self.abandon()
        elif not self.waiter.done():
            self.waiter.set_result(None)

    def result(self) -> T:
        """Return the result of work that has ended, once, or raise its error."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._result.pop()
        finally:
            del error  # it would be in a circle with this frame

    def abandon(self) -> None:
        """Let go of the outcome, whose error is in a circle with this job: nobody asks for it any more."""
        self.waiter = self._error = None
        self._result.clear()

    def seconds(self) -> float:
        """Return for how long a thread has run it, without waits for a core after the first look."""
        if self._thread is None:
            return 0.0
        waited = seconds_without_core(self._thread)
        self._waited = waited if self._waited is None else self._waited
        return time.monotonic() - self._began - (waited - self._waited)


class ThreadPool:
    """Threads that do one kind of work, in the order of arrival.

    A thread does one job after the other while any wait. What has ended until the event loop comes to it wakes the loop
    once. Threads start at the loop's next turn, as they compete with the rest of this one for the interpreter's lock.

    Args:
        capacity: jobs that wait or run at once; None: as many as the service has places.
        background: leave the processor to every other thread that needs it (Linux).
    """

    def __init__(self, name: str, threads: int, *, capacity: int | None = None, background: bool = False) -> None:
        self.executor = ThreadPoolExecutor(
            threads, thread_name_prefix=name, initializer=lower_priority if background else None
        )
        self._background = background
        self._jobs: set[_Job[Any]] = set()
        self._waiting: OrderedDict[_Job[Any], Callable[[], Any]] = OrderedDict()
        self._free = threads
        self._lock = threading.Lock()  # of the two above
        self._ended: deque[_Job[Any]] = deque()
        self._woken: asyncio.AbstractEventLoop | None = None  # the loop that will look at what has ended
        self._timers = Timers()
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
        loop = asyncio.get_running_loop()
        job: _Job[T] = _Job(deadline, loop.create_future())
        self._timers.set(job, deadline.remaining(), partial(self._expire, job))
        self._jobs.add(job)
        with self._lock:
            self._waiting[job] = work
            if self._free:
                loop.call_soon(self._start)
        del work
        try:
            await job.waiter  # type: ignore[misc]
        except BaseException:
            try:
                with self._lock:
                    dropped = self._waiting.pop(job, None) is not None
                if dropped:
                    self._jobs.discard(job)
                elif not (self._background or job.ended):
                    job.waiter = loop.create_future()
                    await job.waiter
            finally:
                job.abandon()
            raise
        finally:
            self._timers.clear(job)
        return job.result()

    def _expire(self, job: _Job[Any]) -> None:
        if job.waiter is not None and not job.waiter.done():
            error = DeadlineExceeded(f"the time was up before one of the {self._name} threads was done")
            job.waiter.set_exception(error)

    def _start(self) -> None:
        with self._lock:
            if not (self._free and self._waiting):
                return
            self._free -= 1
        self.executor.submit(self._work_off)

    def _work_off(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._free += 1
                    return
                job, work = self._waiting.popitem(last=False)
            job.run(work)
            del work
            self._ended.append(job)
            loop = job.loop
            if not (self._woken is loop or loop.is_closed()):
                self._woken = loop
                loop.call_soon_threadsafe(self._wake_callers)

    def _wake_callers(self) -> None:
        self._woken = None  # before the look: what ends after it wakes the loop again
        while self._ended:
            job = self._ended.popleft()
            self._jobs.discard(job)
            job.end()

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
        with self._lock:
            dropped = list(self._waiting)
            self._waiting.clear()
        for job in dropped:
            job.ended = True
            if job.waiter is not None:
                job.waiter.cancel()
        self.executor.shutdown(wait=False, cancel_futures=True)
