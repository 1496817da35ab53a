"""One connection to the HTTP protocol in memory: bytes in, answers out, and a clock that moves only when told to."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, cast
from unittest.mock import patch

import httptools
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from service.http.exchange import exchange_of
from service.http.lifecycle import Lifecycle
from service.http.protocol import HttpProtocol
from service.observe.metrics import Metrics
from service.web.middleware import RequestContextMiddleware

TURNS = 32
"""Turns of the event loop after which whatever can happen has happened."""


@dataclass
class Timer:
    when: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Clock:
    """Stands in for the event loop of a protocol; time stands still until `advance`."""

    now: float = 0.0
    timers: list[Timer] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.now + delay, callback)
        self.timers.append(timer)
        return timer

    def create_task(self, *args: Any, **options: Any) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(*args, **options)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer.when <= self.now]
        self.timers = [timer for timer in self.timers if timer.when > self.now]
        for timer in due:
            if not timer.cancelled:
                timer.callback()


class Transport(asyncio.Transport):
    """Keeps what is written; it is its own socket, on which the peer left `error`."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.ended = False
        self.closed = False
        self.paused = False
        self.unread = 0
        self.error = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    getpeername = getsockname
    family = socket.AF_INET

    def getsockopt(self, level: int, name: int) -> int:
        assert (level, name) == (socket.SOL_SOCKET, socket.SO_ERROR)
        return self.error

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.closed:
            self.written += data

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_write_buffer_size(self) -> int:
        return self.unread


class Answers:
    """Parses what the server wrote; anything that is not HTTP raises `httptools.HttpParserError`."""

    def __init__(self, written: bytes) -> None:
        self.statuses: list[int] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.whole = 0
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(written)

    def on_message_begin(self) -> None:
        self.headers.append({})
        self.bodies.append(b"")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[-1][name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self.statuses.append(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        self.bodies[-1] += body

    def on_message_complete(self) -> None:
        self.whole += 1

    @property
    def code(self) -> str:
        """The problem code of the last answer."""
        assert self.headers[-1]["content-type"] == "application/problem+json"
        document = json.loads(self.bodies[-1])
        assert document["status"] == self.statuses[-1]
        assert document["request_id"] == self.headers[-1]["x-request-id"]
        code: str = document["code"]
        return code


class CountingParser(httptools.HttpRequestParser):
    """Fails when it is fed more often than the chunk that came allows: a loop without end has its end here."""

    left = 0

    def feed_data(self, data: Any) -> None:
        type(self).left -= 1
        assert self.left >= 0, "the protocol feeds its parser without making progress"
        super().feed_data(data)

    @classmethod
    @contextmanager
    def bounded(cls, size: int) -> Iterator[None]:
        """Allow one feed for a chunk of `size` bytes, and two more for each head that can end within it.

        An offer of another protocol takes two: the head again without the offer, and the rest. The first head may have
        only its last byte here; each further one has more than eight.
        """
        cls.left = 1 + 2 * (1 + size // 8)
        with patch.object(httptools, "HttpRequestParser", cls):
            yield


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes


class Wire:
    """A connection to an application that answers every whole request with an empty 200. Needs a running loop.

    Attributes:
        requests: those that the application received to their end.
        gate: the application answers while this is set.

    Args:
        options: of `HttpProtocol`.
    """

    def __init__(self, **options: Any) -> None:
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            proxy_headers=False,
            ws="none",
            lifespan="off",
            log_config=None,
        )
        self.clock = Clock()
        self.state = ServerState()
        self.transport = Transport()
        self.requests: list[Request] = []
        self.gate = asyncio.Event()
        self.gate.set()
        with CountingParser.bounded(0):
            self.protocol = HttpProtocol(
                config=config,
                server_state=self.state,
                app_state={},
                _loop=cast(Any, self.clock),
                app=RequestContextMiddleware(self._app, Metrics(), (), Lifecycle()),
                **options,
            )
        self.protocol.connection_made(self.transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave from the caller's side; nothing may go on running for a caller that is gone."""
        self.gate.set()
        self.protocol.connection_lost(None)
        await self.settle()
        assert not self.state.tasks
        assert not self.state.connections

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect" or exchange_of(scope).broken_framing is not None:
                break
            body += message["body"]
            more = message["more_body"]
        else:
            self.requests.append(Request(scope["method"], scope["path"], body))
        await self.gate.wait()
        status = 400 if exchange_of(scope).broken_framing is not None else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def send(self, data: bytes) -> None:
        """Hand the server one chunk, if it still reads, and let everything happen that follows from it."""
        assert not self.transport.paused, "the server does not read"
        if not self.transport.closed:
            with CountingParser.bounded(len(data)):
                self.protocol.data_received(data)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)

    @property
    def closing(self) -> bool:
        """Whether the server says nothing more."""
        return self.transport.closed or self.transport.ended

    @property
    def answers(self) -> Answers:
        answers = Answers(self.transport.written)
        assert answers.whole == len(answers.statuses), "half an answer"
        return answers
