"""Limits of time and bytes for answers that their callers do not read."""

from __future__ import annotations

import asyncio
import sys
from typing import Protocol

STALL_SECONDS = 30.0


class Connection(Protocol):
    """A connection whose caller has not read all of its answer."""

    transport: asyncio.Transport


class UnreadAnswers:
    """Aborts connections whose callers read nothing for `STALL_SECONDS`, or whose answers exceed the capacity.

    Belongs to one event loop.

    Args:
        capacity: bytes that may wait for callers. Beyond it, the connections that have been reading for longest are
            aborted, but never the connection whose answer came last.
    """

    def __init__(self, capacity: int = sys.maxsize) -> None:
        self._capacity = capacity
        self._timers: dict[Connection, asyncio.TimerHandle] = {}

    def add(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        """Watch a connection until `remove`."""
        self._watch(connection, loop)
        total = sum(_unread(each) for each in self._timers)
        for each in list(self._timers):
            if total <= self._capacity or each is connection:
                return
            total -= _unread(each)
            self._cut(each)

    def remove(self, connection: Connection) -> None:
        """Forget a connection whose answer is read, or that has ended."""
        timer = self._timers.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def _watch(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        left = _unread(connection)

        def check() -> None:
            if _unread(connection) < left:
                self._watch(connection, loop)
            else:
                self._cut(connection)

        self._timers[connection] = loop.call_later(STALL_SECONDS, check)

    def _cut(self, connection: Connection) -> None:
        self.remove(connection)
        connection.transport.abort()


def _unread(connection: Connection) -> int:
    """Return the bytes of an answer that the system has not taken yet."""
    return connection.transport.get_write_buffer_size()
