"""Listening sockets: accepting callers as fast as they come, and the port of gRPC.

libuv, and so uvloop, accepts one connection in each turn of the event loop, which takes milliseconds under load: beside
32 callers who classified without a pause, 200 who connected for each request waited 1.7 and 3.4 s for their answers
(95th percentile, two runs), and 0.7 and 0.8 s with this.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator

from service.settings import Settings

_MORE_A_TURN = 16

_LAST_TURNS = 128
"""Turns in which callers are accepted before the end of listening: enough for all that the kernel may hold (2048)."""


class Acceptor:
    """Accepts further connections in each turn of the event loop that follows an accepted connection."""

    def __init__(self, listeners: Iterable[socket.socket], make_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners = [socket.socket(fileno=os.dup(listener.fileno())) for listener in listeners]
        self._make_protocol = make_protocol
        self._is_due = False
        self._tasks: set[asyncio.Task[object]] = set()

    async def close(self) -> None:
        """Accept every connection that the kernel holds, give each its protocol, and accept no more.

        The caller closes the listeners at once: a connection that arrives in between is reset.
        """
        for _ in range(_LAST_TURNS):
            if not self._accept():
                break
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    def accepted(self) -> None:
        """Accept more connections in the next turn, as one has just been accepted."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._accept)

    def _accept(self) -> bool:
        """Accept some of the waiting connections; return whether any has yet to get its protocol."""
        self._is_due = False
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # nobody waits, or no descriptor is free: libuv reports that
                for _ in range(_MORE_A_TURN):
                    connection, _address = listener.accept()
                    connection.setblocking(False)
                    task = self._loop.create_task(self._connect(connection))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        return bool(self._tasks)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # the caller is gone already
            connection.close()


@contextlib.contextmanager
def grpc_port_kept(settings: Settings) -> Iterator[Settings]:
    """Return the settings with the port of gRPC, if it is served, and keep the port for this service's workers.

    The library opens its listeners itself, in each worker. So a socket that takes no callers holds the port before and
    between them (SO_REUSEPORT). Raises `OSError` if the port is not available.
    """
    if settings.grpc_port is None:
        yield settings
        return
    with socket.socket(address_family(settings.host), socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        address = settings.host, settings.grpc_port
        try:
            holder.bind(address)
        except OSError:  # perhaps connections of another program have just ended there
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(address)
        yield settings.model_copy(update={"grpc_port": holder.getsockname()[1]})


def address_family(host: str) -> socket.AddressFamily:
    """Return the family of a host's address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
