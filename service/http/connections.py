"""All connections of a process: their limit, their eviction order, and their timers."""

import asyncio
from collections import OrderedDict, deque
from functools import partial
from typing import Final

from service.errors import ReceivingFull, RequestTimeout
from service.http.application import HttpApplication
from service.http.connection import HttpConnection

MAX_CONNECTIONS: Final = 2048
"""Connections of a process: eight for each slot of a queue of the default size."""

_MAX_ENDING = 64  # connections beyond the limit that are still being refused
_READ_BYTES = 128 << 10


class Connections:
    """The connections of a process, on one event loop.

    Attributes:
        idle_seconds: longest idle time of a connection after an answer.
        buffer: shared buffer for reads from the sockets.
        open: connections within the limit, ordered by the last activity, the oldest first.
        ending: connections beyond the limit, refused or evicted.
        ending_since: time on the event loop's clock at which the server began to end; None until
            then. Connections then close after their next answer, or a second after `shutdown`.
        protocol: factory of new connections for uvicorn.
    """

    def __init__(self, app: HttpApplication, max_connections: int, *, idle_seconds: float) -> None:
        self.app = app
        self.idle_seconds = idle_seconds
        self.buffer = memoryview(bytearray(_READ_BYTES))
        self.open: OrderedDict[HttpConnection, None] = OrderedDict()
        self.ending: set[HttpConnection] = set()
        self.ending_since: float | None = None
        self.protocol = partial(HttpConnection, self)
        self._max_connections = max_connections
        self._pipelining: deque[HttpConnection] = deque()

    def add(self, connection: HttpConnection) -> None:
        """Add a connection; at the limit, evict the longest waiting connection.

        If every other connection has a complete request, refuse the new one.
        """
        if len(self.open) >= self._max_connections:
            self._make_room(connection)
        if connection not in self.ending:
            self.open[connection] = None

    def begin_later(self, connection: HttpConnection) -> None:
        """Queue a connection whose next request has already arrived behind the last one.

        Each iteration of the event loop begins only one such request. Otherwise a client with many
        connections that pipeline cheap requests would keep the loop from all others.
        """
        connection.is_pipelining = True
        self._pipelining.append(connection)
        if len(self._pipelining) == 1:
            asyncio.get_running_loop().call_soon(self._begin_next)

    def _begin_next(self) -> None:
        connection = self._pipelining.popleft()
        connection.is_pipelining = False
        if not connection.left.done():
            connection.advance()
        if self._pipelining:
            asyncio.get_running_loop().call_soon(self._begin_next)

    def _make_room(self, connection: HttpConnection) -> None:
        evicted = connection
        for candidate in self.open:
            if candidate.request is None or candidate.request.more_body:
                evicted = candidate
                break
        self.open.pop(evicted, None)
        self.ending.add(evicted)
        is_idle = evicted is not connection and evicted.request is None
        if is_idle or len(self.ending) > _MAX_ENDING:
            evicted.transport.abort()
        elif evicted is connection:
            evicted.refuse(ReceivingFull(f"all {self._max_connections} connections are in use"))
        else:
            evicted.refuse(
                RequestTimeout("the body arrived too slowly while others waited for a connection")
            )

    async def watch(self) -> None:
        """Check every connection each second, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            for connection in [*self.open, *self.ending]:
                connection.check(asyncio.get_running_loop().time())
