"""Bodies that are being received: their bytes are bounded, and callers that crawl give way.

A body takes a place in the service only when it is here whole, so a caller that sends slowly keeps nobody out. What it
does hold is bounded here. The bytes of all bodies count from their arrival until the request is answered. When room is
wanted, the bodies that arrive more slowly than they must are ended first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice, takewhile

from service.errors import ReceivingFull

MIN_BODY_RATE = 4096
"""Bytes a second below which a body crawls."""

GRACE_SECONDS = 1.0
"""Seconds by which a body may be behind its rate before it crawls; a burst buys no more than that either."""

PROMISE_SECONDS = 0.1
"""Age up to which a body is expected to be here soon, and to take a place."""


class ByteBudget:
    """Counts how many of `capacity` bytes of memory for bodies are taken. Belongs to one event loop."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_use = 0

    def take(self, count: int) -> bool:
        """Take `count` bytes; return whether there was room for them."""
        if self.in_use + count > self.capacity:
            return False
        self.in_use += count
        return True

    def give_back(self, count: int) -> None:
        """Give back `count` bytes."""
        self.in_use -= count


class Body:
    """A request's body, an `ArrivingBody` of `service.http.exchange`.

    Attributes:
        size: bytes of it that are counted.
        gave_way: whether it was ended because others wanted its room.
        began: reading of the clock when it was first expected.
        paid_until: reading of the clock until which its bytes are fast enough; after it the body crawls.
    """

    def __init__(self, receiving: Receiving) -> None:
        self.size = 0
        self.gave_way = False
        self.began = 0.0
        self.paid_until = 0.0
        self._receiving = receiving

    def crawls(self) -> bool:
        """Return whether it arrives more slowly than it must, see `Receiving.crawls`."""
        return self._receiving.crawls(self)

    def give_way(self) -> None:
        """End it, if it still arrives: the room of its connection is wanted."""
        self._receiving.end(self)


class Receiving:
    """The bodies of one web worker that are being received.

    Args:
        budget: for the bytes of all bodies.
        min_rate: bytes a second below which a body crawls; 0: none ever does.
        spacious: so many bodies may arrive at the same time before crawling ones are ended.
        turnover: seconds in which newcomers may take over the room of all bodies. Callers that were ended return at
            once if they mean harm; so spread out, they cost others no time.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        budget: ByteBudget,
        *,
        min_rate: int,
        spacious: int,
        turnover: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget = budget
        self._min_rate = min_rate
        self._spacious = spacious
        self._turnover = turnover
        self._next_end = -math.inf
        self._clock = clock
        self._arriving: dict[Body, Callable[[], None]] = {}

    @contextmanager
    def body(self) -> Iterator[Body]:
        """Return a new body, whose bytes count until the context ends."""
        body = Body(self)
        try:
            yield body
        finally:
            self._give_back(body)

    @contextmanager
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
        """Return whether a body that arrives has come more slowly than it must since it began, a moment aside.

        For the room of its connection, which others need at once: there is no grace.
        """
        if body not in self._arriving or not self._min_rate:
            return False
        return body.began + body.size / self._min_rate + PROMISE_SECONDS < self._clock()

    def end(self, body: Body) -> None:
        """Let a body give way, if it still arrives: the room of its connection is wanted."""
        if body in self._arriving:
            self._give_way(body)

    def newcomers(self, most: int) -> int:
        """Return how many bodies began to arrive a moment ago, at most `most`."""
        since = self._clock() - PROMISE_SECONDS
        recent = takewhile(lambda body: body.began >= since, reversed(self._arriving))
        return sum(1 for _ in islice(recent, most))

    def add(self, body: Body, count: int) -> None:
        """Count bytes that arrived; other bodies that crawl give way if there is no room, the largest first.

        Raises:
            ReceivingFull: there is no room for them.
        """
        if self._min_rate:
            paid = body.paid_until + count / self._min_rate
            body.paid_until = min(paid, self._clock() + GRACE_SECONDS)
        while not self._budget.take(count):
            crawling = [other for other in self._crawling() if other is not body and other.size]
            if not crawling:
                raise ReceivingFull(f"{self._budget.capacity} bytes of pictures are being received already")
            self._give_way(max(crawling, key=lambda other: other.size))
        body.size += count

    def _make_room(self) -> None:
        now, count = self._clock(), len(self._arriving)
        if count >= self._spacious and now >= self._next_end and (crawling := self._crawling()):
            self._next_end = now + self._turnover / count
            self._give_way(min(crawling, key=lambda other: other.paid_until))

    def _crawling(self) -> list[Body]:
        now = self._clock()
        return [body for body in self._arriving if body.paid_until < now] if self._min_rate else []

    def _give_way(self, body: Body) -> None:
        body.gave_way = True
        self._give_back(body)
        self._arriving.pop(body)()

    def _give_back(self, body: Body) -> None:
        self._budget.give_back(body.size)
        body.size = 0
