"""A connection that speaks HTTP/1.1, with bounds on everything but the body, and problem documents as refusals.

It is a class for uvicorn's `Config(http=...)`, and reads of uvicorn what any such class is given: its configuration,
and the state in which the server counts connections and tasks. httptools parses; `service.http.exchange` answers.

    bytes -> parser -> Exchange, which waits for those before it -> a task of the application -> bytes
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import urllib.parse
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import httptools
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from service.errors import MalformedRequest, MethodNotAllowed, ReceivingFull, ServiceError
from service.http.connections import Rank, UnreadAnswers, make_room, rank_of
from service.http.exchange import Header, HttpExchange, check_head, head_bytes, may_discard

_MAX_HEAD_BYTES = 64 << 10
_MAX_HEADERS = 256  # each costs thirty times its shortest form in memory
_MAX_WAITING = 8  # requests that came before their answers; a single read may hold thousands
_MAX_BODY_BYTES = 64 << 10
"""Bytes of a body that wait for the application before the connection is read no further."""
SURPLUS = 64
"""Connections beyond the limit: those whose refusal is on its way, and those that close slowly."""
HEAD_SECONDS = 30.0
LINGER_SECONDS = 2.0
HEARING_SECONDS = 0.5
_HEARING_TURNS = 5

_TURNS = itertools.count()


class Application(Protocol):
    """The application behind a server."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""

    def refuse(self, error: ServiceError, headers: list[Header]) -> tuple[int, list[Header], bytes]:
        """Count bytes that never become a request, of which `headers` came, and return status, headers and body."""


class HttpProtocol(asyncio.Protocol):
    """Serves HTTP/1.1. Refuses heads, chunk extensions and trailers that are too large or too slow.

    Broken framing of a body is reported to the request's handler, which answers it. Any other bytes that are not HTTP,
    and a CONNECT, are answered here with a problem document. If earlier requests still wait for their answers, those go
    out instead, and the connection closes. So it does when very many requests wait. A caller that offers another
    protocol is answered in this one. When the process has more than `max_connections`, those that have waited longest
    for a request are closed.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        app: Application,
        max_connections: int = sys.maxsize,
        on_connection: Callable[[], None] = lambda: None,
        unread_answers: UnreadAnswers | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self._config = config
        self._server_state = server_state
        self._connections = cast("set[object]", server_state.connections)
        self._app_state = app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._app = app
        self._max_connections = max_connections
        self._on_connection = on_connection
        self._unread_answers = unread_answers or UnreadAnswers()
        self.writable = asyncio.Event()
        self.writable.set()
        self._parser = self._new_parser()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_is_for_head = False
        self._is_reading = True
        self._is_refused = False
        self._is_surplus = False  # refused because there were too many connections
        self._turn = next(_TURNS)
        self._newest: HttpExchange | None = None
        self._running: HttpExchange | None = None  # or was answered last
        self._waiting: deque[tuple[HttpExchange, Scope]] = deque()
        self._overhead = 0  # bytes since the last that belonged to a body or ended a request
        self._offers_upgrade = False
        self._url = b""
        self._headers: list[Header] = []

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # What follows a request that says `Connection: close` has no meaning; the answer goes out all the same.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    @property
    def default_headers(self) -> list[Header]:
        """Return the headers that every answer has."""
        return self._server_state.default_headers

    @property
    def rank(self) -> Rank | None:
        """Return how soon this connection may be closed for another, see `Connection.rank`."""
        if self._is_surplus or self.transport.is_closing():
            return None
        return rank_of(self._newest, self._turn, self._loop.time() - self._made)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timer of the first request; if there are too many connections, close others or refuse this."""
        self.transport = cast(asyncio.Transport, transport)
        self._made = self._loop.time()
        self._server, self._client = (_address(transport.get_extra_info(name)) for name in ("sockname", "peername"))
        self._connections.add(self)
        self._on_connection()
        if len(self._connections) <= self._max_connections or self._has_room():
            self._start_head_timer()
            return
        self._is_surplus = True
        self._refuse(ReceivingFull(f"all {self._max_connections} connections are in use"))
        if len(self._connections) > self._max_connections + SURPLUS:
            self.transport.close()

    def _has_room(self) -> bool:
        """Return whether there is room for this connection, or others gave way to it."""
        others = [c for c in self._connections if isinstance(c, HttpProtocol) and c is not self]
        # A connection that closes, but has an answer to send, holds its descriptor.
        held = sum(not (c.transport.is_closing() or c._is_surplus) for c in others)
        is_full = held >= self._max_connections or len(others) >= self._max_connections + SURPLUS
        return not is_full or make_room(others)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and end the request that is being answered."""
        self._connections.discard(self)
        self._stop_timer()
        self._unread_answers.remove(self.transport)
        self.writable.set()
        if self._running is not None:
            self._running.disconnect()
        self._newest = self._running = None
        self._waiting.clear()
        self._is_refused = True

    def close(self) -> None:
        """Close the connection; if a request's body crawls, only after the answer to it."""
        newest = self._newest
        if newest is None or newest.status is not None or newest.arriving is None:
            self.transport.close()
        else:
            newest.keep_alive = False
            newest.arriving.give_way()

    def shutdown(self) -> None:
        """Close the connection when requests that are on their way have arrived; the server has stopped listening."""
        self._close_after_turns(_HEARING_TURNS)

    def _close_after_turns(self, turns: int) -> None:
        # A loop that is late runs its timers before it reads, so there are several, with reads in between.
        if turns > 0:
            self._loop.call_later(HEARING_SECONDS / _HEARING_TURNS, partial(self._close_after_turns, turns - 1))
        elif self._newest is None or self._newest.complete:
            self.transport.close()
        else:
            self._newest.keep_alive = False

    def data_received(self, data: bytes) -> None:
        """Bound what the parser does not: headers, chunk extensions, trailers, and the time that they take."""
        if self._is_refused:
            return
        self._overhead += len(data)
        if not self._timer_is_for_head:
            self._stop_timer()
        rest = memoryview(data)
        try:
            while rest and not self._is_refused:
                rest = rest[self._parse(rest) :]
        except httptools.HttpParserError:
            self._refuse(MalformedRequest("this is not HTTP/1.1"))
        newest = self._newest
        if self._overhead > _MAX_HEAD_BYTES:
            self._refuse(MalformedRequest(f"more than {_MAX_HEAD_BYTES} bytes that are no body"))
        elif newest is None or (newest.complete and (self._overhead or newest.more_body)):
            self._start_head_timer()  # a new head has begun, or a body is discarded
        elif newest.more_body and newest.waiting_bytes > _MAX_BODY_BYTES:
            self._pause_reading()

    def _parse(self, data: memoryview) -> int:
        """Return the number of bytes parsed: at least one, and all of them unless a head asks for another protocol."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade()
            end_of_head: int = upgrade.args[0]
            return end_of_head
        return len(data)

    def _decline_upgrade(self) -> None:
        """Parse the head again without its offer, so that what follows is its body; refuse a CONNECT.

        No server need accept an offer. Java's client offers h2c with each of its first requests. The bytes after a
        CONNECT are not HTTP.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(MethodNotAllowed("CONNECT: this server is no proxy"))
            return
        lines = [method + b" " + self._url + b" HTTP/" + self._parser.get_http_version().encode()]
        lines += [name + b": " + value for name, value in self._headers if name != b"upgrade"]
        # The parser that read a head that says "close" parses nothing more.
        self._parser = self._new_parser()
        self._parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def on_message_begin(self) -> None:
        """Drop the head of the previous request."""
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        """Keep a piece of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header or trailer, unless there are too many."""
        if len(self._headers) >= _MAX_HEADERS:
            self._refuse(MalformedRequest(f"more than {_MAX_HEADERS} headers"))
        else:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Begin the request, unless it asks for another protocol."""
        if self._is_refused:
            return
        if len(self._waiting) >= _MAX_WAITING:
            raise httptools.HttpParserError("too many requests before their answers: nothing more is parsed")
        self._offers_upgrade = self._parser.should_upgrade()
        if self._offers_upgrade:
            return
        self._stop_timer()
        # A whole head may come in one read, and a body behind it would reset the count of overhead.
        if len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers) > _MAX_HEAD_BYTES:
            self._refuse(MalformedRequest(f"a head of more than {_MAX_HEAD_BYTES} bytes"))
            return
        try:
            check_head(self._parser.get_http_version(), self._headers)
        except ServiceError as error:
            self._refuse(error)
            return
        self._begin()

    def _begin(self) -> None:
        version, method = self._parser.get_http_version(), self._parser.get_method().decode("ascii")
        target = httptools.parse_url(self._url)
        if target.path is None:
            raise httptools.HttpParserError("the target names no path")
        path = target.path.decode("ascii")
        headers = self._headers
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._server,
            "client": self._client,
            "scheme": "http",
            "method": method,
            "root_path": self._config.root_path,
            "path": self._config.root_path + (urllib.parse.unquote(path) if "%" in path else path),
            "raw_path": self._config.root_path.encode() + target.path,
            "query_string": target.query or b"",
            "headers": headers,
            "state": self._app_state.copy(),
        }
        exchange = HttpExchange(
            self,
            method,
            version,
            keep_alive=version != "1.0" and self._parser.should_keep_alive(),
            # The clients of HTTP/1.0 know no interim answer.
            expects_continue=version != "1.0" and any(name == b"expect" for name, _ in headers),
        )
        exchange.discards_body = may_discard(version, headers)
        before, self._newest = self._newest, exchange
        if before is not None:
            exchange.refused_before = before.refused_at
        if before is None or before.complete:
            self._run(exchange, scope)
        else:
            self._pause_reading()
            self._waiting.append((exchange, scope))

    def _run(self, exchange: HttpExchange, scope: Scope) -> None:
        self._running = exchange
        self._turn = next(_TURNS)
        task = self._loop.create_task(exchange.run(self._config.loaded_app, scope))
        self._server_state.tasks.add(task)
        task.add_done_callback(self._server_state.tasks.discard)

    def on_body(self, body: bytes) -> None:
        """Pass a piece of the body on, and reset the count of overhead: the reader bounds the body."""
        if self._is_refused:
            return
        self._overhead = 0
        newest = cast(HttpExchange, self._newest)
        if not newest.complete:
            newest.add_body(body)

    def on_message_complete(self) -> None:
        """Reset the count of overhead at the end of a request."""
        if self._offers_upgrade or self._is_refused:
            return
        self._overhead = 0
        newest = cast(HttpExchange, self._newest)
        newest.end_body()
        if newest.complete:  # answered early, and now read to its end
            self._start_idle_timer()

    def answered(self, exchange: HttpExchange) -> None:
        """Run the next request after a complete answer, or wait for it."""
        if self.transport.is_closing():
            return
        self.resume_reading()
        if self._waiting:
            self._run(*self._waiting.popleft())
        elif exchange.more_body:
            self._start_head_timer()
        else:
            self._start_idle_timer()

    def pause_writing(self) -> None:
        """Start the timer of a caller that does not read its answers."""
        self.writable.clear()
        self._unread_answers.add(self.transport, self._loop)

    def resume_writing(self) -> None:
        """Stop the timer of a caller that reads again."""
        self._unread_answers.remove(self.transport)
        self.writable.set()

    def _pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read from the socket again."""
        if not self._is_reading:
            self._is_reading = True
            self.transport.resume_reading()

    def _refuse(self, error: ServiceError) -> None:
        """Refuse bytes that are no request, or break off a request's body; nothing more is parsed."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._stop_timer()
        newest = self._newest
        if newest is not None and not newest.complete:
            newest.keep_alive = False
            if newest.more_body:
                newest.broken_framing = str(error)
                newest.end_body()
                return
        status, headers, content = self._app.refuse(error, self._headers)
        if newest is not None and not newest.complete:
            return
        head = head_bytes(status, [*self.default_headers, (b"connection", b"close"), *headers])
        self.transport.write(head + content)
        # Closed with bytes unread, the connection would be reset, and the caller might never see the answer.
        self.transport.write_eof()
        self._loop.call_later(LINGER_SECONDS, self.transport.close)

    def _start_head_timer(self) -> None:
        if self._timer is None or not self._timer_is_for_head:
            self._start_timer(HEAD_SECONDS, is_for_head=True)

    def _start_idle_timer(self) -> None:
        self._start_timer(self._config.timeout_keep_alive, is_for_head=False)

    def _start_timer(self, seconds: float, *, is_for_head: bool) -> None:
        self._stop_timer()
        self._timer, self._timer_is_for_head = self._loop.call_later(seconds, self.transport.close), is_for_head

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_is_for_head = None, False


def _address(name: object) -> tuple[str, int] | None:
    """Return host and port of a socket's name; None of one that has none, such as a Unix socket."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
