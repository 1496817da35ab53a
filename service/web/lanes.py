"""Threads for CPU work beside the event loop: a lane each for small pictures, big pictures and drawings.

One kind of work never holds the threads of another. Big pictures wait for each other, and not in front of small ones;
a drawing of two seconds waits for other drawings. Work whose time is up or whose caller has left is dropped: at once
while it waits, and between two of its steps while a thread is at it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from model.images.control import WorkControl
from service.errors import ClientDisconnected, DeadlineExceeded, QueueFull
from service.priority import lower_priority

T = TypeVar("T")

LARGE = 2000
"""Values from which on a document is read or written by a thread: they would hold the event loop for 5 to 10 ms."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The reading `at` of the monotonic `clock`, seconds, at which a request's time is up."""

    at: float
    clock: Callable[[], float] = time.monotonic

    def remaining(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self.at - self.clock())


class PictureTooBig(Exception):
    """The picture belongs to the lane of big ones; nothing of it is decoded yet."""


class Control(WorkControl):
    """Ends work at its deadline, when its caller leaves, or when it turns out to belong to another lane.

    Args:
        max_cost: what a picture may cost, in pixels of an 8-bit RGB PNG; None: whatever is allowed.
    """

    def __init__(self, deadline: Deadline, max_cost: float | None) -> None:
        self._deadline = deadline
        self._max_cost = max_cost
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        """Let the next `check` fail: the caller left."""
        self._abandoned.set()

    def estimated(self, cost: float) -> None:
        """Raise `PictureTooBig` if this lane has no time for such a picture."""
        if self._max_cost is not None and cost > self._max_cost:
            raise PictureTooBig

    def check(self) -> None:
        """Raise `ClientDisconnected` or `DeadlineExceeded` if nobody waits for the work any more."""
        if self._abandoned.is_set():
            raise ClientDisconnected("the caller went away")
        if self._deadline.remaining() == 0.0:
            raise DeadlineExceeded("the time was up before the image was decoded or drawn")


Work = Callable[[Control], T]
"""CPU work that asks its control between its steps."""


class _Job(Generic[T]):
    """Work in a pool's queue, which keeps what was cancelled until a thread comes to it: the picture goes before."""

    def __init__(self, work: Work[T], control: Control) -> None:
        self.work: Work[T] | None = work
        self.control = control

    def __call__(self) -> T:
        self.control.check()
        work, self.work = self.work, None
        assert work is not None, "a job runs once, and is not dropped before"
        return work(self.control)


class Lane:
    """Threads that do one kind of work, in the order in which it came.

    Args:
        capacity: jobs that wait or run at once; None: as many as the service has places.
        max_cost: see `Control`.
        background: leave the processor to every other thread that wants it (Linux).
    """

    def __init__(
        self,
        name: str,
        threads: int,
        *,
        capacity: int | None = None,
        max_cost: float | None = None,
        background: bool = False,
    ) -> None:
        self.pool = ThreadPoolExecutor(
            threads, thread_name_prefix=name, initializer=lower_priority if background else None
        )
        self.outstanding = 0
        self._name = name
        self._capacity = capacity
        self._max_cost = max_cost

    async def run(self, work: Work[T], deadline: Deadline) -> T:
        """Run work on one of the threads and return its result.

        The call ends only after the thread has let go of the picture, so that its place in the service is not given
        to another before.

        Raises:
            QueueFull: `capacity` is reached.
            DeadlineExceeded: the time was up before the work was done.
            PictureTooBig, Exception: what the work raises.
        """
        if self._capacity is not None and self.outstanding >= self._capacity:
            raise QueueFull(f"all {self._capacity} places of the {self._name} threads are taken")
        control = Control(deadline, self._max_cost)
        job = _Job(work, control)
        submitted = self.pool.submit(job)
        future = asyncio.wrap_future(submitted)
        self.outstanding += 1
        try:
            await asyncio.wait((future,), timeout=deadline.remaining())
            if submitted.cancel():  # no thread has begun it
                raise DeadlineExceeded(f"the time was up before one of the {self._name} threads was free")
            await asyncio.wait((future,))  # a thread whose time is up ends between two steps
        except asyncio.CancelledError:
            control.abandon()
            if not submitted.cancel():
                await asyncio.wait((future,))
                future.exception()  # seen, though nobody asks for it any more
            raise
        finally:
            self.outstanding -= 1
            job.work = None
        return future.result()

    async def run_large(self, work: Callable[[], T], deadline: Deadline, *, size: int) -> T:
        """Run work on one of the threads if it handles many values, else here; raises what `run` raises."""
        if size < LARGE:
            return work()
        found: list[
            T
        ] = []  # a future is in a circle with its callbacks, and keeps its result until the collector comes by
        await self.run(lambda _: found.append(work()), deadline)
        return found.pop()

    def close(self) -> None:
        """Drop what waits and take nothing more, without waiting for the threads."""
        self.pool.shutdown(wait=False, cancel_futures=True)
