"""Admission: bounds on what requests take of the service, from the head to the answer.

    the head is here        a place must be free, but the request takes none yet; slow callers keep nobody out
    the body arrives        its bytes are counted until the request is answered; bodies that crawl give way
    the body is here        the request takes a place for each image, and releases it with the answer or the error
    there is no room        it is refused at once, or waits for its turn where refusals themselves are too many

A body crawls when it arrives more slowly than `MIN_BODY_RATE`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import AbstractContextManager
from itertools import islice, takewhile
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from service.errors import QueueFull, ReceivingFull
from service.http import Guard

MIN_BODY_RATE: Final = 4096
"""Bytes a second below which a body crawls."""

GRACE_SECONDS: Final = 1.0
"""Seconds by which a body may be behind its rate before it crawls. A burst of bytes earns no more than that either."""

PROMISE_SECONDS: Final = 0.1
"""Age up to which a body is expected to be here soon, and to take a place."""

_REFUSALS_A_SECOND: Final = 500
"""Refusals that go out at once: a tenth of a core."""

LONGEST_WAIT: Final = 1.0
"""Seconds that a refusal waits at most: the least that `Retry-After` says."""


class _Usage:
    """How much of `capacity` is taken, by this worker (`in_use`) and over all; belongs to one event loop.

    Args:
        cells: what each worker has taken; several workers share them.
        locked: guards what is read and written in one step.
    """

    def __init__(
        self,
        capacity: int,
        cells: MutableSequence[int] | NDArray[np.uint64] | None = None,
        worker: int = 0,
        locked: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.capacity = capacity
        self.in_use = 0
        self._cells = [0] if cells is None else cells
        self._worker = worker
        self._locked = locked

    @property
    def taken(self) -> int:
        """Return how much is taken over all workers."""
        return int(sum(self._cells))

    def _add(self, count: int) -> None:
        self.in_use += count
        self._cells[self._worker] = self.in_use


class Limiter(_Usage):
    """Counts how many of the service's places for images are taken."""

    def check(self, count: int = 1) -> None:
        """Raise `QueueFull` unless `count` places are free."""
        if self.taken + count > self.capacity:
            raise QueueFull(f"all {self.capacity} places in the service are taken")

    def acquire(self) -> None:
        """Take one place; raises `QueueFull` if none is free."""
        with self._locked():  # others can only release meanwhile
            self.check()
            self._add(1)

    def release(self, count: int = 1) -> None:
        """Give back `count` places."""
        self._add(-count)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Give one place back until the context ends, and then take it again, even if none is free."""
        self._add(-1)
        try:
            yield
        finally:
            self._add(1)

    def permit(self) -> Permit:
        """Take one place, and return the permit that holds it; raises `QueueFull` if none is free."""
        permit = Permit(self)
        permit.extend()
        return permit


class ByteBudget(_Usage):
    """Counts how many bytes of memory for bodies are taken.

    Workers that take bytes at the same moment may go beyond the capacity by one read of a socket each.
    """

    def take(self, count: int) -> bool:
        """Take `count` bytes; return whether there was room for them."""
        if self.taken + count > self.capacity:
            return False
        self._add(count)
        return True

    def give_back(self, count: int) -> None:
        """Give back `count` bytes."""
        self._add(-count)


class Permit:
    """The places of one request; a context manager that releases them.

    A request gets all of its places or none: when `extend` fails, leaving the context releases what it had.
    """

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._held = 0

    def extend(self, count: int = 1) -> None:
        """Take `count` places more; raises `QueueFull` if fewer are free."""
        for _ in range(count):
            self._limiter.acquire()
            self._held += 1

    def lent(self) -> AbstractContextManager[None]:
        """Lend one of its places to others until the context ends, while its work waits for something else."""
        return self._limiter.lent()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._limiter.release(self._held)
        self._held = 0


class Body:
    """A request's body; as a context manager it counts while that lasts.

    Attributes:
        size: bytes of it that are counted.
        gave_way: whether it was ended because others needed its room.
        began: reading of the clock when it was first expected.
        paid_until: reading of the clock until which its bytes are fast enough; after it the body crawls.
    """

    def __init__(self, receiving: Receiving) -> None:
        self.size = 0
        self.gave_way = False
        self.began = 0.0
        self.paid_until = 0.0
        self._receiving = receiving

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._receiving.give_back(self)

    def crawls(self) -> bool:
        """Return whether it arrives more slowly than it must, see `Receiving.crawls`."""
        return self._receiving.crawls(self)

    def give_way(self) -> None:
        """End it, if it still arrives: another caller needs its connection."""
        self._receiving.give_way(self)


class Receiving:
    """The bodies of one web worker that are being received.

    Args:
        spacious: bodies that may arrive at the same time before those that crawl are ended.
        turnover: seconds in which newcomers may take over the room of all bodies. Hostile callers that were ended
            return at once; spread over this time, they do not delay others.
    """

    def __init__(
        self, budget: ByteBudget, *, spacious: int, turnover: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._budget = budget
        self._spacious = spacious
        self._turnover = turnover
        self._next_end = -math.inf
        self._clock = clock
        self._arriving: dict[Body, Callable[[], None]] = {}

    def body(self) -> Body:
        """Return a new body, whose bytes count until its context ends."""
        return Body(self)

    @contextlib.contextmanager
    def arriving(self, body: Body, end: Callable[[], None]) -> Iterator[None]:
        """Let a body arrive while the context lasts; `end` is called if it gives way, and must end it soon.

        Where many arrive already, the slowest of those that crawl gives way to it.
        """
        self._make_room()
        body.began = self._clock()
        body.paid_until = body.began + GRACE_SECONDS
        self._arriving[body] = end
        try:
            yield
        finally:
            self._arriving.pop(body, None)

    def crawls(self, body: Body) -> bool:
        """Return whether a body that arrives has been slower than its rate since it began, less `PROMISE_SECONDS`.

        Another caller needs its connection at once, so it gets no grace.
        """
        return body in self._arriving and body.began + body.size / MIN_BODY_RATE + PROMISE_SECONDS < self._clock()

    def give_way(self, body: Body) -> None:
        """End a body, if it still arrives: others need its room."""
        end = self._arriving.pop(body, None)
        if end is not None:
            body.gave_way = True
            self.give_back(body)
            end()

    def newcomers(self, most: int) -> int:
        """Return how many bodies began to arrive less than `PROMISE_SECONDS` ago, at most `most`."""
        since = self._clock() - PROMISE_SECONDS
        recent = takewhile(lambda body: body.began >= since, reversed(self._arriving))
        return sum(1 for _ in islice(recent, most))

    def add(self, body: Body, count: int) -> None:
        """Count bytes that arrived; raises `ReceivingFull` if there is no room even when bodies that crawl give way."""
        body.paid_until = min(body.paid_until + count / MIN_BODY_RATE, self._clock() + GRACE_SECONDS)
        while not self._budget.take(count):
            crawling = [other for other in self._crawling() if other is not body and other.size]
            if not crawling:
                raise ReceivingFull(f"{self._budget.capacity} bytes of pictures are being received already")
            self.give_way(max(crawling, key=lambda other: other.size))
        body.size += count

    def _make_room(self) -> None:
        now, count = self._clock(), len(self._arriving)
        if count >= self._spacious and now >= self._next_end and (crawling := self._crawling()):
            self._next_end = now + self._turnover / count
            self.give_way(min(crawling, key=lambda other: other.paid_until))

    def _crawling(self) -> list[Body]:
        now = self._clock()
        return [body for body in self._arriving if body.paid_until < now]

    def give_back(self, body: Body) -> None:
        """Count the bytes of a body no more."""
        self._budget.give_back(body.size)
        body.size = 0


class RefusalPace:
    """Delays refusals of callers that come back at once, against their `Retry-After`.

    A refusal costs 0.2 ms, and the picture that is read and discarded as much again. A hundred callers who come back at
    once would take the core that answers others. So a caller that comes back within a second on its connection waits
    for a second, and so does everyone beyond `_REFUSALS_A_SECOND`. `clock` gives monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._credit: float = _REFUSALS_A_SECOND
        self._counted_at = clock()

    def delay(self, connection: Guard | None) -> float:
        """Return the seconds for which a refusal on this connection is to wait."""
        now = self._clock()
        earned = (now - self._counted_at) * _REFUSALS_A_SECOND
        self._credit, self._counted_at = min(_REFUSALS_A_SECOND, self._credit + earned), now
        comes_back = connection is not None and now - connection.refused_at < LONGEST_WAIT
        delay = LONGEST_WAIT if comes_back or self._credit < 1 else 0.0
        if not delay:
            self._credit -= 1
        if connection is not None:
            connection.refused_at = now + delay
        return delay
