"""HTTP/1.1 over sockets: a connection parses requests, and each is a task of the application.

    socket --bytes--> Connection --head, body--> Exchange --receive--> the application
    socket <--bytes-- Connection <-------------- Exchange <---send---- the application

httptools parses heads. Heads, framing, time, unread answers, and the number of connections are bounded here, and what
is no valid request is answered with a problem document. Bodies are bounded by the application that reads them. A
request that comes before its connection's last answer waits unparsed.
"""

import asyncio
import contextlib
import copy
import logging
import re
import socket
import urllib.parse
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Final, Protocol

import httptools
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from service.errors import MalformedRequest, ReceivingFull, RequestTimeout, ServiceError

logger = logging.getLogger(__name__)

Header = tuple[bytes, bytes]

MAX_CONNECTIONS: Final = 2048
"""Connections of a process: eight for each place of the usual queue."""

IDLE_SECONDS: Final = 75.0
"""Time after which an idle connection is closed: load balancers keep theirs for a minute, and must close first."""

HEAD_SECONDS: Final = 30.0
STALL_SECONDS: Final = 30.0
"""Time after which a caller who reads nothing of its answer loses the connection."""

LINGER_SECONDS: Final = 10.0
"""Time for which the rest of a refused body is discarded: closed at once, the connection would be reset, and the caller
might never see its answer."""

LAST_CALLERS_SECONDS: Final = 1.0
"""Time after the listener is closed, for who was let in just before."""

DISCARDED_BYTES: Final = 1 << 20
"""Length of a body that is read to its end after a refusal: a new connection costs both sides more."""

_MOST_ENDING = 64  # connections beyond the limit, whose refusal is on its way
_MAX_HEAD_BYTES = 64 << 10
_MAX_HEADERS = 256  # each costs thirty times its shortest form in memory
_MAX_DIGITS = 20  # of a length; the parser bounds the number, but not its zeros in front, and Python reads 4,300 digits
_READ = 128 << 10
_PAUSE_BYTES = 64 << 10  # of a body that the application has not read
_CHUNKS_AT_ONCE = 256  # before others have their turn at the event loop
_CHUNK_FRAMING = 6  # bytes of a small chunk
_UNSENT_BYTES = 128 << 10  # of a connection's answers, in the kernel; by itself it takes 2.5 MiB

# The framing of a body in chunks (RFC 9112, 7.1): what comes next, whole, and as far as it may have come. What is begun
# is matched anew with each read: its length is bounded, or bytes that come one by one would cost ever more.
_FRAMING: Final = {
    "size": (
        re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]{0,9}(?:;[^\r\n\0]{0,999})?\r\n"),
        re.compile(rb"[0-9A-Fa-f]{0,15}[ \t]{0,9}(?:;[^\r\n\0]{0,999})?\r?"),
    ),
    "end": (re.compile(rb"\r\n"), re.compile(rb"\r?")),
    "trailers": (
        re.compile(
            rb"(?!(?:Content-Length|Transfer-Encoding):)[!#$%&'*+.^`|~\w-]{1,99}:[^\r\n\0]{0,899}\r\n|\r\n",
            re.IGNORECASE,
        ),
        re.compile(rb"[^\r\n\0]{0,999}\r?"),
    ),
}

_CONNECTION = "connection"


class Application(Protocol):
    """The application behind a server."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""

    def refuse(self, error: ServiceError, headers: Iterable[Header]) -> tuple[int, list[Header], bytes]:
        """Count bytes that never become a request, of which `headers` came, and return status, headers and body."""


class Exchange:
    """A request and its answer, as ASGI has them.

    Attributes:
        left: bytes of the body that have not come, or of its chunk.
        comes: what comes next of a body in chunks: a chunk's size, data or end, trailers, or nothing.
        framing: bytes of such a body that are no content.
        more_body: the end of the body has not come.
        waiting: bytes of the body that have come, and the application has not read.
        answered, complete: the answer has begun, and is written to its end.
        keep_alive: the connection goes on after the answer.
        error: of the body, which is then parsed no further.
    """

    def __init__(self, connection: "Connection", scope: Scope, *, keep_alive: bool) -> None:
        headers = dict(scope["headers"])
        self.left = int(headers.get(b"content-length", 0))
        self.is_chunked = b"transfer-encoding" in headers
        self.comes = "size"
        self.waiting = self.framing = self._content = 0
        self.more_body = self.is_chunked or self.left > 0
        self.answered = self.complete = False
        self.keep_alive = keep_alive
        self.error: ServiceError | None = None
        self._connection = connection
        self._is_head = scope["method"] == "HEAD"  # the scope itself holds the exchange
        expects = headers.get(b"expect", b"").lower() == b"100-continue"
        self._expects_continue = expects and scope["http_version"] == "1.1"
        self._may_discard = not (self.is_chunked or self.left > DISCARDED_BYTES or b"expect" in headers)
        self._parts: list[bytes] = []
        self._has_end = False  # the application
        self._waiter: asyncio.Future[None] | None = None
        self._head = b""

    def add(self, part: bytes) -> None:
        """Take a part of the body; it is dropped once the answer has begun."""
        self.left -= len(part)
        self._content += len(part)
        if not self.answered:
            self._parts.append(part)
            self.waiting += len(part)
            self.wake()

    def take_framing(self, found: re.Match[bytes]) -> None:
        """Go on behind a piece of the framing; raises `MalformedRequest` if it outweighs the content."""
        self.framing += len(found[0])
        if self.comes == "size":
            self.left = int(found[1], 16)
            self.comes = "data" if self.left else "trailers"
        elif self.comes == "end":
            self.comes = "size"
        elif found[0] == b"\r\n":
            self.comes = "nothing"
        if self.framing // _CHUNK_FRAMING > 64 + self._content // 32:
            raise MalformedRequest("more than 32 chunks in a KiB of the body")

    def wake(self) -> None:
        """Let the application see what has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def run(self, app: Application, scope: Scope) -> None:
        """Let the application answer; the connection closes if it does not do so to the end."""
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            logger.exception("the application failed")
        finally:
            if not self.complete:
                self._connection.transport.close()
            del self._connection  # what the application leaves to the garbage collector may hold this

    async def receive(self) -> Message:
        """Return the next part of the body, or `http.disconnect` once there can be none; raises `error`."""
        connection = self._connection
        if self._expects_continue and not (self.answered or connection.transport.is_closing()):
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        while not (self.error or self.complete or connection.left.done()):
            if self._parts or not (self.more_body or self._has_end):
                parts, self._parts, self.waiting = self._parts, [], 0
                self._has_end = not self.more_body
                if self.more_body:
                    connection.advance()
                body = parts[0] if len(parts) == 1 else b"".join(parts)
                return {"type": "http.request", "body": body, "more_body": not self._has_end}
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.error is not None:
            raise copy.copy(self.error)  # what is raised holds its frames, and they the exchange
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send a part of the answer, its head in one packet with the begin of its body."""
        connection = self._connection
        if connection.drained is not None:
            await connection.drained.wait()
        if connection.left.done():
            return
        if message["type"] == "http.response.start":
            self._head = self._answer_head(message["status"], message["headers"])
            self.answered, self._parts, self.waiting = True, [], 0
            return
        head, self._head = self._head, b""
        if not connection.transport.is_closing():  # else its caller has closed its side, and is taken for one that left
            parts = (head, b"" if self._is_head else message["body"])
            connection.transport.writelines([part for part in parts if part])  # asyncio would try for ever to send b""
        if not message.get("more_body", False):
            self.complete = True
            self.wake()
            connection.answered(self)

    def _answer_head(self, status: int, headers: Iterable[Header]) -> bytes:
        """Return the head of the answer, which says whether the connection goes on.

        It does not if the answer has no length, or if more of the request's body comes than is worth reading.
        """
        connection, named = self._connection, dict(headers)
        closes = connection.is_refused or connection.connections.is_ending or b"close" in named.get(b"connection", b"")
        is_worth_reading = self._may_discard and status != HTTPStatus.REQUEST_TIMEOUT
        has_end = b"content-length" in named or status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
        self.keep_alive = self.keep_alive and has_end and not closes and (is_worth_reading or not self.more_body)
        others = [header for header in headers if header[0] != b"connection"]
        return head_of(status, connection.state.default_headers + others, closes=not self.keep_alive)


def _head_error(scope: Scope) -> MalformedRequest | None:
    """Return the error of a head that a proxy may read in another way."""
    names = [name for name, _ in scope["headers"]]
    codings = [value.strip().lower() for name, value in scope["headers"] if name == b"transfer-encoding"]
    version, hosts = scope["http_version"], names.count(b"host")
    if scope["method"] == "CONNECT":
        return MalformedRequest("CONNECT: this server is no proxy")
    if version not in ("1.0", "1.1"):
        return MalformedRequest(f"HTTP/{version}: this server speaks HTTP/1.1")
    if any(name == b"content-length" and len(value) > _MAX_DIGITS for name, value in scope["headers"]):
        return MalformedRequest(f"Content-Length: more than {_MAX_DIGITS} digits")
    if hosts > 1 or (version == "1.1" and hosts == 0):
        return MalformedRequest(f"{hosts} Host headers: expected one")
    if codings and (codings != [b"chunked"] or version == "1.0"):
        return MalformedRequest("Transfer-Encoding: only chunked is understood, once, and in HTTP/1.1")
    return None


def head_of(status: int, headers: Iterable[Header], *, closes: bool) -> bytes:
    """Return the head of an answer; raises `RuntimeError` if a header holds a line break."""
    status_line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()
    fields = [b"%b: %b" % (name, value) for name, value in headers]
    lines = [status_line, *fields, *[b"connection: close"] * closes, b""]
    head = b"\r\n".join([*lines, b""])
    if head.count(b"\n") + head.count(b"\r") != 2 * len(lines):
        raise RuntimeError("a header with a line break")
    return head


class Connection(asyncio.BufferedProtocol):
    """A connection, as uvicorn's `Config(http=...)` takes one: of uvicorn it reads its configuration and state.

    Attributes:
        connections: of which it is one.
        state: of uvicorn.
        transport: of the socket.
        left: done when the socket is closed.
        refused_at: seconds of the application's clock at which it last refused a request here for want of room.
        is_refused: nothing that arrives now is parsed.
        exchange: the request that is being answered, or whose body is being discarded.
        drained: set once the caller reads its answers again; None while it does.
        head_size: bytes of a request's head that has not ended.
    """

    transport: asyncio.Transport

    def __init__(
        self, connections: "Connections", config: uvicorn.Config, state: ServerState, app_state: dict[str, Any]
    ) -> None:
        self.connections = connections
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.refused_at = float("-inf")
        self.is_refused = False
        self.drained: asyncio.Event | None = None
        self.head_size = 0
        self._loop = asyncio.get_running_loop()
        self._app: Any = config.loaded_app
        self.state = state
        self._app_state = app_state
        self.exchange: Exchange | None = None
        self._held = b""
        self._is_reading = self._is_new = True
        self._is_behind = False  # it is about to take what has come
        self._since = self._loop.time()  # when it began to wait for what `check` bounds
        self._unread = 0  # bytes of answers when `check` last saw the caller read
        self._new_head()

    # As the socket's protocol:

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # sockets have no other
        """Begin to wait for a request, if there is room for one connection more."""
        self.transport = transport
        self._server, self._client = (_address(transport.get_extra_info(name)) for name in ("sockname", "peername"))
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self.state.connections.add(self)  # type: ignore[arg-type]  # what uvicorn shuts down, and waits for
        if self.connections.is_ending:
            self.shutdown()
        self.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell uvicorn and the application that the caller is gone."""
        self.state.connections.discard(self)
        self.connections.remove(self)
        self.is_refused = True
        self._held = b""
        self.left.set_result(None)
        del self._parser  # which holds the connection
        self.resume_writing()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.wake()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self.connections.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse bytes as far as they can be taken now."""
        if self.is_refused:
            return
        data = bytes(self.connections.buffer[:nbytes])
        self._held = self._held + data if self._held else data
        self.advance()

    def pause_writing(self) -> None:
        """Begin to watch a caller that does not read its answers."""
        self._since, self._unread = self._loop.time(), self.transport.get_write_buffer_size()
        self.drained = asyncio.Event()

    def resume_writing(self) -> None:
        """Watch a caller that reads again no longer."""
        drained, self.drained = self.drained, None
        if drained is not None:
            self._since = self._loop.time()
            drained.set()

    # It parses:

    def advance(self) -> None:
        """Take what has come: a head, and as much of its body as there is room for; read more if there is."""
        self._is_behind = False
        while self._held and not (self.is_refused or self._is_behind):
            exchange = self.exchange
            if exchange is None:
                self._take_head()
            elif not exchange.more_body or exchange.waiting > _PAUSE_BYTES:
                break
            elif not exchange.is_chunked:
                part, self._held = self._held[: exchange.left], self._held[exchange.left :]
                exchange.add(part)
                if not exchange.left:
                    self._end_body(exchange)
            elif not self._take_chunks(exchange):
                break
        exchange, reads = self.exchange, True
        if exchange is not None and not self.is_refused:
            more = exchange.waiting if exchange.more_body else len(self._held)
            reads = more <= _PAUSE_BYTES and not self._is_behind
        if reads != self._is_reading:
            self._is_reading = reads
            (self.transport.resume_reading if reads else self.transport.pause_reading)()

    def _yield(self) -> None:
        """Go on at the event loop's next turn."""
        if not self._is_behind:
            self._is_behind = True
            self._loop.call_soon(self.advance)

    def _new_head(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._headers = b"", list[Header]()
        self._tail, self.head_size, self._is_whole = b"", 0, False

    def on_url(self, url: bytes) -> None:
        """Keep a piece of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Keep what the parser forgets with the end of a request without a body."""
        self._is_whole, self._keep_alive = True, self._parser.should_keep_alive()

    def _take_head(self) -> None:
        """Parse up to the end of a head, and begin its request. What is behind is not for its parser."""
        if not self.head_size:
            self._since = self._loop.time()
        known = self._tail + self._held
        blank = 0 if self._url else len(known) - len(known.lstrip(b"\r\n"))  # lines before the request
        end = known.find(b"\r\n\r\n", blank) + 4
        size = len(self._held) if end < 4 else end - len(self._tail)
        piece, self._held = self._held[:size], self._held[size:]
        self._tail = known[-3:] if end < 4 else b""
        self.head_size += size
        if self.head_size <= _MAX_HEAD_BYTES:
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserUpgrade:
                pass  # no server need accept an offer; Java's client makes one with each of its first requests
            except httptools.HttpParserError:
                self.refuse(MalformedRequest("this is not HTTP/1.1"))
                return
        if self.head_size > _MAX_HEAD_BYTES or len(self._headers) > _MAX_HEADERS:
            self.refuse(MalformedRequest(f"a head of more than {_MAX_HEAD_BYTES} bytes or {_MAX_HEADERS} headers"))
        elif self._is_whole:
            self._begin()

    def _begin(self) -> None:
        parser, headers, url = self._parser, self._headers, self._url
        version = parser.get_http_version()
        try:
            target = httptools.parse_url(url)
            path = target.path.decode("ascii")
        except (httptools.HttpParserInvalidURLError, AttributeError, UnicodeDecodeError):
            self.refuse(MalformedRequest("the target of the request names no path"), headers)
            return
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._server,
            "client": self._client,
            "scheme": "http",
            "method": parser.get_method().decode("ascii"),
            "root_path": "",
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "raw_path": target.path,
            "query_string": target.query or b"",
            "headers": headers,
            "state": {**self._app_state, _CONNECTION: self},
        }
        error = _head_error(scope)
        if error is not None:
            self.refuse(error, headers)
            return
        exchange = self.exchange = Exchange(self, scope, keep_alive=version == "1.1" and self._keep_alive)
        self._new_head()
        self.connections.wait(self, waits=exchange.more_body)
        task = self._loop.create_task(exchange.run(self._app, scope))
        self.state.tasks.add(task)
        task.add_done_callback(self.state.tasks.discard)
        if exchange.is_chunked:
            self._yield()  # the application may refuse it by its head

    def _take_chunks(self, exchange: Exchange) -> bool:
        """Take chunks of a body, as many as others can wait for; return whether it could take anything."""
        held, at = self._held, 0
        for _ in range(_CHUNKS_AT_ONCE):
            if not exchange.more_body or at == len(held):
                break
            if exchange.comes == "data":
                part = held[at : at + exchange.left]
                exchange.add(part)
                at += len(part)
                exchange.comes = "data" if exchange.left else "end"
                continue
            whole, begun = _FRAMING[exchange.comes]
            found = whole.match(held, at)
            if found is None:
                if begun.fullmatch(held, at) is None:
                    self.refuse(MalformedRequest("this is no chunk of HTTP/1.1"))
                break
            at = found.end()
            try:
                exchange.take_framing(found)
            except MalformedRequest as error:
                self.refuse(error)
                break
            if exchange.comes == "nothing":
                self._end_body(exchange)
        else:
            self._yield()
        self._held = held[at:] if not self.is_refused else b""
        return at > 0

    def _end_body(self, exchange: Exchange) -> None:
        exchange.more_body = False
        exchange.wake()
        self.connections.wait(self, waits=False)
        if exchange.complete:
            self._next()

    # It answers, and ends:

    def answered(self, exchange: Exchange) -> None:
        """Go on after an answer that is written to its end."""
        self._since = self._loop.time()
        if self.is_refused or self.connections.is_ending or not exchange.keep_alive:
            if exchange.more_body or self._held:  # more may come, and would reset the connection
                self._linger()
            else:
                self.transport.close()
            return
        if exchange.more_body:  # which is discarded
            self.connections.wait(self)
        else:
            self._next()
        self.advance()

    def _next(self) -> None:
        """Wait for the next request."""
        self.exchange, self._is_new, self._since = None, False, self._loop.time()
        self.connections.wait(self)

    def refuse(self, error: ServiceError, headers: Iterable[Header] = ()) -> None:
        """Parse nothing more, and answer with a problem, or let the request answer whose body comes; then close."""
        if self.is_refused:
            return
        self.is_refused, self._held = True, b""
        self.connections.wait(self, waits=False)
        exchange = self.exchange
        if exchange is None:
            status, named, content = self.connections.app.refuse(error, headers)
            self.transport.writelines((head_of(status, named, closes=True), content))
            self._linger()
        else:
            exchange.error = error
            exchange.wake()

    def give_way(self) -> None:
        """End the connection for another."""
        if self.exchange is None or self.exchange.complete:
            self.transport.abort()
        else:
            self.refuse(RequestTimeout("the body came too slowly while others waited for its connection"))

    def _linger(self) -> None:
        """Close the connection when its caller has, or soon; what still comes is discarded."""
        self.is_refused, self._held, self._since = True, b"", self._loop.time()
        self.connections.wait(self)
        if not self.transport.is_closing():
            with contextlib.suppress(OSError):  # its caller has reset it
                self.transport.write_eof()
            self.advance()

    def shutdown(self) -> None:
        """Close the connection after its answer, or soon: its request may be on the way."""
        self._loop.call_later(LAST_CALLERS_SECONDS, self._close_idle)

    def _close_idle(self) -> None:
        if self.exchange is None or self.exchange.complete:  # else its answer closes it
            self.transport.close()

    def check(self, now: float) -> None:
        """End the connection if a head is late, or if its caller is idle, or reads nothing of an answer."""
        exchange = self.exchange
        is_idle = exchange is None and not (self.head_size or self._is_new)
        most = LINGER_SECONDS if self.is_refused else IDLE_SECONDS if is_idle else HEAD_SECONDS
        if self.drained is not None:
            unread = self.transport.get_write_buffer_size()
            if unread < self._unread:
                self._since, self._unread = now, unread
            elif now - self._since > STALL_SECONDS:
                self.transport.abort()
        elif exchange is None or exchange.complete or self.transport.is_closing():
            if now - self._since <= most:
                return
            if self.head_size and not self.is_refused:
                self.refuse(RequestTimeout(f"the head did not arrive within {HEAD_SECONDS:g} s"))
            else:
                self.transport.abort()  # to close it would wait for a caller that reads nothing


def _address(name: object) -> tuple[str, int] | None:
    """Return host and port of a socket's name; None of one that has none, such as a Unix socket."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


def connection_of(scope: Scope) -> Connection | None:
    """Return the connection that a request came over; None under another server."""
    connection: Connection | None = scope.get("state", {}).get(_CONNECTION)
    return connection


class Connections:
    """The connections of a process, on one event loop.

    Attributes:
        app: that they serve.
        buffer: where any of them reads.
        open: those that have room.
        waiting: those of them that wait for a request, or for its body, the longest first.
        ending: those beyond the limit: they were refused, or gave way.
        is_ending: no more are let in, and each ends with its next answer, or a second after it was to be closed.
    """

    def __init__(self, app: Application, most: int = MAX_CONNECTIONS) -> None:
        self.app = app
        self.buffer = memoryview(bytearray(_READ))
        self.waiting: dict[Connection, None] = {}
        self.open: set[Connection] = set()
        self.ending: set[Connection] = set()
        self.is_ending = False
        self._most = most

    def protocol(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], **_: object
    ) -> Connection:
        """Return the protocol of a new connection, as uvicorn asks for it."""
        return Connection(self, config, server_state, app_state)

    def add(self, connection: Connection) -> None:
        """Add a connection; if there are too many, end the one that has waited longest for its caller, or refuse it."""
        if len(self.open) >= self._most and self.waiting:
            longest = next(iter(self.waiting))
            self.remove(longest)
            self._end(longest, longest.give_way)
        if len(self.open) < self._most:
            self.open.add(connection)
            self.wait(connection)
        else:
            full = ReceivingFull(f"all {self._most} connections are in use")
            self._end(connection, lambda: connection.refuse(full))

    def _end(self, connection: Connection, end: Callable[[], None]) -> None:
        self.ending.add(connection)
        (end if len(self.ending) <= _MOST_ENDING else connection.transport.abort)()

    def wait(self, connection: Connection, *, waits: bool = True) -> None:
        """Note that a connection waits for its caller from now on, or that it does not."""
        self.waiting.pop(connection, None)
        if waits and connection in self.open:
            self.waiting[connection] = None

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self.open.discard(connection)
        self.ending.discard(connection)
        self.waiting.pop(connection, None)

    async def watch(self) -> None:
        """Check every connection each second, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            self.check(loop.time())

    def check(self, now: float) -> None:
        """Check every connection at this time of the event loop."""
        for connection in [*self.open, *self.ending]:
            connection.check(now)
