"""Limits of a process's connections: how many are open, how much of their answers is unread, and file descriptors."""

from __future__ import annotations

import asyncio
import errno
import heapq
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from service.http.exchange import HttpExchange

logger = logging.getLogger(__name__)

_OTHER_FILES = 128
"""File descriptors that are reserved for other files."""

_MOST_AT_ONCE = 32
"""Connections that are closed together, so that not every newcomer costs a scan of all of them."""

_NEWCOMER_SECONDS = 1.0
"""Age at which a connection should have brought a request. A younger connection's first request may be on its way."""

_CRAWLER, _IDLE, _NEWCOMER = range(3)

_QUIET_SECONDS = 60.0
"""Seconds between two log messages about missing descriptors."""

Rank = tuple[int, int]
"""The order in which connections are closed: by kind, and by the turn at which the last request began."""


STALL_SECONDS = 30.0
"""Time after which a caller who reads nothing of its answer loses the connection."""


class Connection(Protocol):
    """An open connection."""

    @property
    def rank(self) -> Rank | None:
        """Return `rank_of` this connection, or None if it is not to be closed."""

    def close(self) -> None:
        """Close it."""


def rank_of(newest: HttpExchange | None, turn: int, age: float) -> Rank | None:
    """Return the rank of a connection of this age, in seconds, by its newest request, which began at `turn`.

    Return None if that request is being answered, or is being received and its body does not crawl.
    """
    if newest is None:
        return _NEWCOMER if age < _NEWCOMER_SECONDS else _CRAWLER, turn
    if newest.complete:
        return _CRAWLER if newest.more_body else _IDLE, turn
    crawls = newest.arriving is not None and newest.arriving.crawls()
    return (_CRAWLER, turn) if newest.is_refused or crawls else None


def make_room(connections: Iterable[Connection]) -> bool:
    """Close the connections of the lowest ranks, at most an eighth of all that wait; return whether any waited.

    Of newcomers a single one is closed, if no other connection waits.
    """
    waiting = [(rank, connection) for connection in connections if (rank := connection.rank) is not None]
    count = max(1, min(_MOST_AT_ONCE, len(waiting) // 8))
    lowest = heapq.nsmallest(count, waiting, key=lambda pair: pair[0])
    for number, ((kind, _), connection) in enumerate(lowest):
        if number == 0 or kind != _NEWCOMER:
            connection.close()
    return bool(waiting)


def connection_limit(configured: int) -> int:
    """Return how many connections this process may hold: `configured`, or fewer if the system allows fewer open files.

    The limit of open files is raised as far as needed, within what the system allows.
    """
    try:
        import resource  # noqa: PLC0415  Windows has none
    except ImportError:
        return configured
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = configured + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return configured
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, allowed - _OTHER_FILES)


class UnreadAnswers:
    """Aborts connections whose callers read nothing for `STALL_SECONDS`. Belongs to one event loop.

    When more than `capacity` bytes wait for callers, the connections that have been reading for longest are aborted,
    too, but never the connection whose answer came last.
    """

    def __init__(self, capacity: int = sys.maxsize) -> None:
        self._capacity = capacity
        self._timers: dict[asyncio.Transport, asyncio.TimerHandle] = {}

    def add(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Watch a connection until `remove`."""
        self._watch(transport, loop)
        total = sum(each.get_write_buffer_size() for each in self._timers)
        for each in list(self._timers):
            if total <= self._capacity or each is transport:
                return
            total -= each.get_write_buffer_size()
            self._abort(each)

    def remove(self, transport: asyncio.Transport) -> None:
        """Forget a connection whose answer is read, or that has ended."""
        timer = self._timers.pop(transport, None)
        if timer is not None:
            timer.cancel()

    def _watch(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        before = transport.get_write_buffer_size()

        def check() -> None:
            if transport.get_write_buffer_size() < before:
                self._watch(transport, loop)
            else:
                self._abort(transport)

        self._timers[transport] = loop.call_later(STALL_SECONDS, check)

    def _abort(self, transport: asyncio.Transport) -> None:
        self.remove(transport)
        transport.abort()


class DescriptorWatch:
    """Logs an error when the process has no file descriptor left, at most once in `_QUIET_SECONDS`.

    Without descriptors the event loop drops callers in silence. `clock` gives monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quiet_until = float("-inf")

    def check(self) -> None:
        """Take a file descriptor and give it back."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            now = self._clock()
            if error.errno in (errno.EMFILE, errno.ENFILE) and now >= self._quiet_until:
                self._quiet_until = now + _QUIET_SECONDS
                logger.error("no file descriptors are left (ulimit -n): connections are dropped unanswered")
