"""A connection in memory to an application that answers complete requests with an empty 200."""

import asyncio
from collections.abc import Iterable
from typing import Any

import httptools
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from service.errors import MalformedRequest, ServiceError
from service.http.application import Header
from service.http.connections import Connections
from service.web.limiter import ByteBudget

Request = tuple[str, str, bytes]
"""Method, path and body."""


class Socket(asyncio.Transport):
    """Keeps written bytes; it is its own socket."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False
        self.paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    getpeername = getsockname
    family = 2

    def setsockopt(self, *_: object) -> None:
        """Take any option."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.closed:
            self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close
    write_eof = abort

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Statuses:
    """Parses bytes of the server; raises `httptools.HttpParserError` unless they are HTTP."""

    def __init__(self, written: bytes) -> None:
        self.all: list[int] = []
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(written)

    def on_message_complete(self) -> None:
        self.all.append(self._parser.get_status_code())


class Wire:
    """A connection. Needs a running loop.

    Attributes:
        requests: completely received requests.
    """

    def __init__(self) -> None:
        self.answer_room = ByteBudget(1 << 20)
        connections = Connections(self, 1, idle_seconds=75)
        config = uvicorn.Config(
            self, interface="asgi3", ws="none", lifespan="off", log_config=None, proxy_headers=False
        )
        config.load()
        self.requests: list[Request] = []
        self.socket = Socket()
        self._rest = b""
        self._guard = connections.protocol(config, ServerState())
        self._guard.connection_made(self.socket)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 200
        body = b""
        more = True
        try:
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
            self.requests.append((scope["method"], scope["path"], body))
        except MalformedRequest:
            status = 400
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-length", b"0")],
            }
        )
        await send({"type": "http.response.body", "body": b""})

    def refuse(
        self, error: ServiceError, headers: Iterable[Header]
    ) -> tuple[int, list[Header], bytes]:
        return 400, [(b"content-length", b"0")], b""

    async def send(self, data: bytes) -> None:
        """Hand the server bytes, as far as it reads, and let everything happen that follows from
        it.
        """
        self._rest += data
        while self._rest and not (self.socket.paused or self.socket.closed):
            buffer = self._guard.get_buffer(-1)
            taken = self._rest[: len(buffer)]
            self._rest = self._rest[len(buffer) :]
            buffer[: len(taken)] = taken
            self._guard.buffer_updated(len(taken))
            for _ in range(30):
                await asyncio.sleep(0)

    @property
    def statuses(self) -> list[int]:
        return Statuses(self.socket.written).all
