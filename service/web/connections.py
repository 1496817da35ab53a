"""How many connections a process holds, and which one is closed for one more."""

from __future__ import annotations

import asyncio
import heapq
import socket
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_OTHER_FILES = 128
"""Descriptors that are left for everything that is no connection."""

_FIRST_LOOK_SECONDS = 0.05
_LONGEST_LOOK_SECONDS = 1.0

_MOST_AT_ONCE = 32
"""Connections closed together, so that not every newcomer costs a look at all of them."""


Rank = tuple[bool, int]
"""Whether a connection ever brought a whole request, and the turn at which its last one began."""


CRAWLS = "vit.crawls"
"""Key of a request's scope under which a function says whether its body crawls; absent before its body is read."""

GIVE_WAY = "vit.give_way"
"""Key of a request's scope under which a function ends its body, so that it is answered; absent as `CRAWLS` is."""


class Connection(Protocol):
    """An open connection."""

    @property
    def rank(self) -> Rank | None:
        """Return the rank of a connection that may be closed, see `rank_of`."""

    def close(self) -> None:
        """Close it."""


def rank_of(cycle: RequestResponseCycle | None, turn: int) -> Rank | None:
    """Return the rank of a connection by its newest request, which began at `turn`.

    None if this is being received, unless its body crawls, or is being answered.
    """
    if cycle is None or cycle.response_complete:
        return cycle is not None and not cycle.more_body, turn
    # Refused, and reading on only so that the caller sees it.
    refused = cycle.response_started and cycle.chunked_encoding is False and cycle.expected_content_length == 0
    crawls: Callable[[], bool] = cast(dict[str, Any], cycle.scope).get(CRAWLS, lambda: False)
    return (False, turn) if refused or crawls() else None


def make_room(connections: Iterable[Connection]) -> bool:
    """Close those of the lowest ranks, at most an eighth of all that wait; return whether there was one."""
    waiting = [(rank, connection) for connection in connections if (rank := connection.rank) is not None]
    count = max(1, min(_MOST_AT_ONCE, len(waiting) // 8))
    for _, connection in heapq.nsmallest(count, waiting, key=lambda pair: pair[0]):
        connection.close()
    return bool(waiting)


def connection_limit(wanted: int) -> int:
    """Return how many connections this process may hold: `wanted`, or fewer if the system allows fewer open files.

    The limit of open files is raised as far as that needs and the system lets it.
    """
    try:
        import resource  # noqa: PLC0415  Windows has none
    except ImportError:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, allowed - _OTHER_FILES)


def watch_for_departure(
    transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, seconds: float = _FIRST_LOOK_SECONDS
) -> None:
    """Cut a connection that sends no more as soon as its caller's system refuses what is sent to it."""

    def look() -> None:
        if transport.is_closing():
            return
        if transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
        else:
            watch_for_departure(transport, loop, min(2 * seconds, _LONGEST_LOOK_SECONDS))

    loop.call_later(seconds, look)
