"""An HTTP/1.1 caller that tells apart every way in which a request can end."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from dataclasses import dataclass
from typing import cast

import httptools

_KEPT_SECONDS = 2.0
"""An idle connection is used again within this time; a server may close one that idles for longer."""


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes


class NotConnected(Exception):
    """Nobody listens: the request was never sent."""


class Cut(Exception):
    """The connection ended before the answer was whole."""


class NoAnswer(Exception):
    """The caller's patience ended first."""


class HttpCaller:
    """Sends requests over connections that are kept alive.

    Args:
        patience: seconds until a request counts as not answered.
    """

    def __init__(self, host: str, port: int, *, patience: float) -> None:
        self._address = (host, port)
        self._patience = patience
        self._idle: list[tuple[float, _Connection]] = []

    async def ask(self, request: bytes) -> Answer:
        """Send one request and return its answer.

        Raises:
            NotConnected, Cut, NoAnswer: there is none.
        """
        connection = await self._connection()
        try:
            async with asyncio.timeout(self._patience):
                answer = await connection.ask(request)
        except TimeoutError:
            connection.abort()
            raise NoAnswer from None
        if connection.keeps:
            self._idle.append((time.monotonic(), connection))
        return answer

    async def leave(self, request: bytes, after: float) -> None:
        """Send a request, or its beginning, and reset the connection after some seconds without reading.

        Raises:
            NotConnected: nobody listens.
        """
        connection = await self._new()
        connection.send(request)
        await asyncio.sleep(after)
        connection.abort()

    async def crawl(self, head: bytes, seconds: float) -> None:
        """Send a head and then one byte a second, for some seconds or until the server ends it.

        Raises:
            NotConnected: nobody listens.
        """
        connection = await self._new()
        connection.send(head)
        for _ in range(round(seconds)):
            if connection.is_closed:
                break
            connection.send(b"x")
            await asyncio.sleep(1)
        connection.abort()

    def close(self) -> None:
        """Close the idle connections."""
        for _, connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _connection(self) -> _Connection:
        while self._idle:
            since, connection = self._idle.pop()
            if time.monotonic() - since < _KEPT_SECONDS and not connection.is_closed:
                return connection
            connection.abort()
        return await self._new()

    async def _new(self) -> _Connection:
        try:
            async with asyncio.timeout(self._patience):
                _, connection = await asyncio.get_running_loop().create_connection(_Connection, *self._address)
        except (OSError, TimeoutError) as error:
            raise NotConnected from error
        return connection


class _Connection(asyncio.Protocol):
    """One request at a time; httptools calls the methods that begin with `on_`."""

    def __init__(self) -> None:
        self.keeps = False
        self.is_closed = False
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Cut())

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        answer = Answer(self._parser.get_status_code(), self._body)
        self.keeps = self._parser.should_keep_alive()
        self._parser, self._body = httptools.HttpResponseParser(self), b""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)
        if not self.keeps and self._transport is not None:
            self._transport.close()

    async def ask(self, request: bytes) -> Answer:
        if self.is_closed:
            raise Cut
        self._answer = asyncio.get_running_loop().create_future()
        self.send(request)
        return await self._answer

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def abort(self) -> None:
        if self._transport is None or self.is_closed:
            return
        found = self._transport.get_extra_info("socket")
        if found is not None:
            # A reset instead of an orderly end: what a caller does that crashes.
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()
