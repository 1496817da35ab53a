"""Admission: a bound on the images that are decoded, queued or computed at once.

A request is refused at its head, before its body is read, when no place is free. It takes its places when its body is
here, so that slow callers keep none, and releases them with the answer, the error or the disconnect. Bodies that are
still arriving are bounded by `service.web.receiving`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Final, Self

from service.errors import QueueFull
from service.http.exchange import Exchange

_REFUSALS_PER_ANSWER: Final = 5
"""At five times its capacity the service refuses everyone at once."""

_MOST_CREDIT: Final = 1000
"""Refusals at once after a quiet time: 0.2 s of work."""

LONGEST_WAIT: Final = 1.0
"""Seconds that a refusal waits at most: the least that `Retry-After` says."""


class Limiter:
    """Counts how many of the service's `capacity` places for images are taken. Belongs to one event loop."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_use = 0

    def check(self, count: int = 1) -> None:
        """Raise `QueueFull` unless `count` places are free."""
        if self.taken + count > self.capacity:
            raise QueueFull(f"all {self.capacity} places in the service are taken")

    @property
    def taken(self) -> int:
        """Return the number of places that are taken."""
        return self.in_use

    def acquire(self) -> None:
        """Take one place; raises `QueueFull` if none is free."""
        self.check()
        self.in_use += 1

    def release(self, count: int = 1) -> None:
        """Give back `count` places."""
        self.in_use -= count

    def permit(self) -> Permit:
        """Take one place, and return the permit that holds it; raises `QueueFull` if none is free."""
        permit = Permit(self)
        permit.extend()
        return permit


class Permit:
    """The places of one request; a context manager that releases them.

    All or none: when `extend` fails, the request fails, and leaving the context releases what it had.
    """

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._held = 0

    def extend(self, count: int = 1) -> None:
        """Take `count` places more; raises `QueueFull` if fewer are free."""
        for _ in range(count):
            self._limiter.acquire()
            self._held += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._limiter.release(self._held)
        self._held = 0


class RefusalPace:
    """Lets callers wait who are refused, and ask again at once although they are told to wait.

    A refusal costs 0.2 ms. A hundred callers who come back at once would take the core that answers others. So for each
    request that is answered some refusals go out at once, and further ones wait for their turn. A connection that
    waits gives way to newcomers, and is forgotten when its caller leaves. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._credit = _MOST_CREDIT
        self._waiting: deque[_Turn] = deque()

    async def turn(self, exchange: Exchange) -> None:
        """Return when a refusal may go out, at the latest after `LONGEST_WAIT` seconds."""
        if self._credit:
            self._credit -= 1
            return
        turn = _Turn()
        exchange.arriving = turn
        self._waiting.append(turn)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_WAIT):
                    await turn.event.wait()
        finally:
            exchange.arriving = None
            with contextlib.suppress(ValueError):  # an answer has let it go
                self._waiting.remove(turn)

    def answered(self) -> None:
        """Count an answer, and let those go who have waited longest."""
        self._credit = min(_MOST_CREDIT, self._credit + _REFUSALS_PER_ANSWER)
        while self._credit and self._waiting:
            self._credit -= 1
            self._waiting.popleft().give_way()


class _Turn:
    """A refusal that waits, an `ArrivingBody` of its connection: the first to be closed for another."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def crawls(self) -> bool:
        """Return that the connection may be closed."""
        return True

    def give_way(self) -> None:
        """Let the refusal go out now."""
        self.event.set()
