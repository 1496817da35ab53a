"""How often the service refuses callers that ask again at once.

A refusal costs little, but a caller that is refused and asks again at once, although told to wait a second or more,
costs it thousands of times a second: with the work of some hundred such callers, the service could answer others. For
each request that is answered some are refused at once. A connection that is refused beyond that is not read for a
while: what it sends waits in the system's buffers, and its caller waits for the next refusal.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial
from typing import Protocol

REFUSALS_PER_ANSWER = 4
"""At five times its capacity a service refuses everyone at once."""

MOST_CREDIT = 1000
"""Refusals at once after a quiet time: about 0.1 s of work."""

LONGEST_PAUSE = 1.0
"""Seconds, the least that `Retry-After` says."""


class Connection(Protocol):
    """What is refused."""

    def pause(self) -> None:
        """Stop reading."""

    def resume(self) -> None:
        """Read again."""


class RefusalPace:
    """Counts refusals against answers, and lets connections wait. Belongs to one event loop."""

    def __init__(self) -> None:
        self._credit = MOST_CREDIT
        self._waiting: OrderedDict[Connection, asyncio.TimerHandle] = OrderedDict()

    def refused(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        """Count a refusal; without credit, its connection is paused until there is some, or `LONGEST_PAUSE` is over."""
        if connection in self._waiting:
            return
        if self._credit:
            self._credit -= 1
            return
        connection.pause()
        self._waiting[connection] = loop.call_later(LONGEST_PAUSE, partial(self.resume, connection))

    def answered(self) -> None:
        """Count an answer, and resume those who waited longest."""
        self._credit = min(MOST_CREDIT, self._credit + REFUSALS_PER_ANSWER)
        while self._credit and self._waiting:
            self._credit -= 1
            self.resume(next(iter(self._waiting)))

    def resume(self, connection: Connection) -> None:
        """Read a connection again, if it is paused."""
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()
            connection.resume()
