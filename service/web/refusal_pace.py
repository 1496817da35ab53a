"""How often the service refuses callers that ask again at once.

A refusal costs little, but a caller that is refused and asks again at once, although told to wait a second or more,
costs it thousands of times a second: with the work of some hundred such callers, the service could answer others. For
each request that is answered some are refused at once. A connection that is refused beyond that is not read for a
while: what it sends waits in the system's buffers, and its caller waits for the next refusal.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from functools import partial
from typing import Protocol

from uvicorn.protocols.http.flow_control import FlowControl

REFUSALS_PER_ANSWER = 5
"""At five times its capacity a service refuses everyone at once, though it answers a sixth fewer than at its peak."""

MOST_CREDIT = 1000
"""Refusals at once after a quiet time: about 0.1 s of work."""

LONGEST_PAUSE = 1.0
"""Seconds, the least that `Retry-After` says."""

_HEARD_SECONDS = 0.2
"""Seconds after a pause in which requests are read that came while it lasted."""

WAITED = "vit.waited"
"""Key of a request's scope under which the HTTP protocol says for how long, at most, it lay there unread."""


class Connection(Protocol):
    """What is refused."""

    def pause(self) -> None:
        """Stop reading."""

    def resume(self) -> None:
        """Read again."""


class RefusalPace:
    """Counts refusals against answers, and lets connections wait. Belongs to one event loop.

    Args:
        longest: seconds of a pause.
    """

    def __init__(self, longest: float = LONGEST_PAUSE) -> None:
        self._longest = longest
        self._credit = MOST_CREDIT
        self._waiting: OrderedDict[Connection, asyncio.TimerHandle] = OrderedDict()

    def refused(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        """Count a refusal; without credit, its connection is paused until there is some, or a pause is over."""
        if connection in self._waiting:
            return
        if self._credit:
            self._credit -= 1
            return
        connection.pause()
        self._waiting[connection] = loop.call_later(self._longest, partial(self.resume, connection))

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


class PacedFlow(FlowControl):
    """uvicorn's control of what is read and written, with pauses that nothing but `let_go` ends.

    The answer to a further request that came together with the refused one would let uvicorn read again.
    """

    _is_held = False
    _pause_began = -math.inf
    _pause_ended = -math.inf

    def hold(self, now: float) -> None:
        """Begin a pause, at this reading of the loop's clock."""
        self._is_held, self._pause_began = True, now
        self.pause_reading()

    def let_go(self, now: float) -> None:
        """End a pause."""
        self._is_held, self._pause_ended = False, now
        self.resume_reading()

    def resume_reading(self) -> None:
        """Read again, unless there is a pause."""
        if not self._is_held:
            super().resume_reading()

    def waited(self, now: float) -> float:
        """Return for how many seconds a request may have lain unread whose head is read now."""
        return self._pause_ended - self._pause_began if now - self._pause_ended < _HEARD_SECONDS else 0.0
