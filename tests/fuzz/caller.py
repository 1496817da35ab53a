"""A client of one connection that sends whatever bytes it is told to, and knows when an answer is whole."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

PATIENCE = 30.0
"""Seconds without an answer after which it is lost."""


class Lost(Exception):
    """An answer did not come, or not whole."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_last(self) -> bool:
        """Whether the server says that it closes the connection."""
        return self.headers.get("connection", "").lower() == "close"


class Caller:
    """A connection to `port` of this machine.

    asyncio's streams would forget what they have received once the connection is reset, as it may be where a server
    closes on a caller that goes on sending.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = b""

    @classmethod
    async def connect(cls, port: int) -> Caller:
        """Open a connection."""
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        return cls(connection)

    async def send(self, data: bytes) -> None:
        """Send bytes; a server that has closed need not take them."""
        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.get_running_loop().sock_sendall(self._socket, data)
        except ConnectionError:
            pass
        except TimeoutError:
            raise Lost(f"nothing more is taken for {PATIENCE:g} s") from None

    async def answer(self, *, to_head: bool = False) -> Answer | None:
        """Return the next final answer, or None where the server has closed the connection.

        Raises:
            Lost: it is not whole, or does not come within `PATIENCE`.
        """
        try:
            async with asyncio.timeout(PATIENCE):
                found = await self._read(to_head)
                while found is not None and found.status < 200:
                    found = await self._read(to_head)
                return found
        except TimeoutError:
            raise Lost(f"nothing within {PATIENCE:g} s") from None

    async def _read(self, to_head: bool) -> Answer | None:
        while b"\r\n\r\n" not in self._received:
            if not await self._receive():
                if self._received:
                    raise Lost(f"half a head: {self._received[:60]!r}")
                return None
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        try:
            status = int(first.split()[1])
            size = 0 if to_head or status < 200 else int(headers["content-length"])
        except (IndexError, KeyError, ValueError):
            raise Lost(f"not an answer: {head[:60]!r}") from None
        while len(self._received) < size:
            if not await self._receive():
                raise Lost(f"half a body behind {first}")
        body, self._received = self._received[:size], self._received[size:]
        return Answer(status, headers, body)

    async def _receive(self) -> bool:
        try:
            data = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16)
        except ConnectionError:
            return False
        self._received += data
        return bool(data)

    def close(self) -> None:
        """Leave, whatever is under way."""
        self._socket.close()
