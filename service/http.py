"""HTTP/1.1 over sockets: a connection parses requests, and each is a task of the application.

    socket --bytes--> Connection --head, body--> Exchange --receive--> the application
    socket <--bytes-- Connection <-------------- Exchange <---send---- the application

httptools parses heads and chunks. Heads, framing, time, unread answers, and the number of
connections are bounded here, and what is no valid request is answered with a problem document.
Bodies are bounded by the application that reads them. A request that comes before its connection's
last answer waits unparsed.
"""

import asyncio
import contextlib
import copy
import logging
import socket
import urllib.parse
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from http import HTTPStatus
from typing import Any, Final, Protocol

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from service.errors import MalformedRequest, ReceivingFull, RequestTimeout, ServiceError

logger = logging.getLogger(__name__)

Header = tuple[bytes, bytes]

MAX_CONNECTIONS: Final = 2048  # of a process: eight for each place of the usual queue
HEAD_SECONDS: Final = 30.0
IDLE_SECONDS: Final = (
    75.0  # after an answer, unless set: load balancers often keep idle connections for 60 s
)
STALL_SECONDS: Final = 30.0  # in which a caller has to read some of its answer
LINGER_SECONDS: Final = (
    10.0  # for the rest of a refused body: to close at once would reset, and may lose the answer
)
LAST_CALLERS_SECONDS: Final = 1.0  # after the listener is closed, for who was let in just before
DISCARDED_BYTES: Final = (
    1 << 20
)  # of a body that is read after a refusal: a new connection costs both sides more

_MOST_ENDING = 64  # connections beyond the limit, whose refusal is on its way
_MAX_HEAD_BYTES = 64 << 10
_MAX_HEADERS = 256  # each costs thirty times its shortest form in memory
_MAX_DIGITS = 20  # of a length; the parser bounds the number, but not its zeros in front, and Python reads 4,300 digits
_READ = 128 << 10
_PAUSE_BYTES = 64 << 10  # of a body that the application has not read
_PIECES_AT_ONCE = 512  # of a body in chunks, before others have their turn at the event loop
_CHUNK_FRAMING = 6  # bytes of a small chunk
_MAX_LINE = 1000  # bytes of a size with its extensions, or of a trailer: what has come is copied with each read
_UNSENT_BYTES = 128 << 10  # of a connection's answers, in the kernel; by itself it takes 2.5 MiB
_SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "scheme": "http",
    "root_path": "",
}
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status} {status.phrase}".encode() for status in HTTPStatus
}


class AnswerRoom(Protocol):
    """Bounds the unsent bytes of answers; may end the connections of slow readers."""

    def add_reader(self, connection: "Connection") -> None:
        """Count the unsent bytes of a connection whose caller does not keep up with its answer."""

    def remove_reader(self, connection: "Connection") -> None:
        """Stop counting the unsent bytes of a connection. No effect if they are not counted."""


class Application(Protocol):
    """The application behind a server."""

    @property
    def answer_room(self) -> AnswerRoom:
        """Return the room for unsent answers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""

    def refuse(
        self, error: ServiceError, headers: Iterable[Header]
    ) -> tuple[int, list[Header], bytes]:
        """Count bytes that never become a request, of which `headers` came, and return status,
        headers and body.
        """


class Exchange:
    """A request and its answer, as ASGI has them; raises `MalformedRequest` if a proxy may read its
    head differently.

    Attributes:
        more_body: the end of the body has not come.
        is_wanted: the body is taken as it comes; where its caller may wait for that, once the
        application asks for it.
        waiting: bytes of the body that have come, and the application has not read.
        framing: bytes of a body in chunks that are no content.
        answered, complete: the answer has begun, and is written to its end.
        keep_alive: the connection goes on after the answer.
        error: of the body, which is then parsed no further.
        news: set when the application is to look at what has changed.
    """

    def __init__(self, connection: "Connection", scope: Scope, *, keep_alive: bool) -> None:
        headers, version = dict(scope["headers"]), scope["http_version"]
        hosts = [name for name, _ in scope["headers"]].count(b"host")
        codings = [
            value.strip().lower()
            for name, value in scope["headers"]
            if name == b"transfer-encoding"
        ]
        length, expected = headers.get(b"content-length", b"0"), headers.get(b"expect", b"")
        if scope["method"] == "CONNECT" or version not in ("1.0", "1.1"):
            raise MalformedRequest(
                f"{scope['method']}, HTTP/{version}: this server speaks HTTP/1.1, and is no proxy"
            )
        if len(length) > _MAX_DIGITS:
            raise MalformedRequest(f"Content-Length: more than {_MAX_DIGITS} digits")
        if hosts > 1 or (version == "1.1" and hosts == 0):
            raise MalformedRequest(f"{hosts} Host headers: expected one")
        if codings and (codings != [b"chunked"] or version == "1.0"):
            raise MalformedRequest(
                "Transfer-Encoding: only chunked is understood, once, and in HTTP/1.1"
            )
        self._left = int(length)  # bytes to come of the body, or of its chunk
        self._parser: httptools.HttpRequestParser | None = None
        if codings:  # the head's own takes what is behind an offer of another protocol for that
            self._parser = httptools.HttpRequestParser(self)
            self._parser.feed_data(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        self.more_body = self._parser is not None or self._left > 0
        self.is_wanted = self._parser is None and not expected
        self._may_discard = self.is_wanted and self._left <= DISCARDED_BYTES
        self._expects_continue = expected.lower() == b"100-continue" and version == "1.1"
        self._is_head = scope["method"] == "HEAD"  # the scope itself holds the exchange
        self._connection = connection
        self._parts = [] if self.more_body else [b""]
        self.waiting = self.framing = self._content = 0
        self.answered = self.complete = False
        self.keep_alive = keep_alive
        self._names_keep_alive = version == "1.0"
        self.error: ServiceError | None = None
        self.news = asyncio.Event()
        self._head = self._line = b""

    def take(self, data: bytes) -> bytes:
        """Take what is of the body, chunks by lines and by what these say, and return the rest;
        raises as a parser.
        """
        at = 0
        for _ in range(_PIECES_AT_ONCE):
            piece = data[at : at + self._left if self._left else data.find(b"\n", at) + 1 or None]
            at += len(piece)
            if self._left:
                self._left -= len(piece)
            else:
                self._line = piece if self._line.endswith(b"\n") else self._line + piece
                self.framing += len(piece)
            if self._parser is not None:
                self._parser.feed_data(piece)
            else:
                self.on_body(piece)
                if not self._left:
                    self.on_message_complete()
            if (
                self.framing // _CHUNK_FRAMING > 64 + self._content // 32
                or len(self._line) > _MAX_LINE
            ):
                raise MalformedRequest(
                    f"more than 32 chunks in a KiB, or {_MAX_LINE} bytes in a line, of the body"
                )
            if at == len(data) or not self.more_body:
                return data[at:]
        asyncio.get_running_loop().call_soon(self._connection.advance)
        return data[at:]

    def on_chunk_header(self) -> None:
        """Learn from its line how long a chunk is, with the line's end behind it."""
        size = int(self._line.partition(b";")[0], 16)
        self._left = size and size + 2
        self.framing += 2

    def on_body(self, part: bytes) -> None:
        """Take a part of the body; it is dropped once the answer has begun."""
        self._content += len(part)
        if not self.answered:
            self._parts.append(part)
            self.waiting += len(part)
            self.news.set()

    def on_message_complete(self) -> None:
        """Note that the body has ended."""
        self.more_body, self.waiting = False, 0
        self._parts = self._parts or [b""]
        self.news.set()

    async def run(self, app: Application, scope: Scope) -> None:
        """Let the application answer; the connection closes if it does not do so to the end."""
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            logger.exception("the application failed")
        finally:
            if not self.complete:
                self._connection.is_refused = True
                self._connection.transport.close()
            self._parser = None  # which holds the exchange
            del (
                self._connection
            )  # what the application leaves to the garbage collector may hold this

    async def receive(self) -> Message:
        """Return the next part of the body, or `http.disconnect` once there can be none; raises
        `error`.
        """
        connection = self._connection
        if not self.is_wanted:
            self.is_wanted = True
            if self._expects_continue and not (self.answered or connection.transport.is_closing()):
                connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            connection.advance()
        while not (self.error or self.complete or connection.left.done()):
            if self._parts:
                parts, self._parts, self.waiting = self._parts, [], 0
                body, more_body = parts[0] if len(parts) == 1 else b"".join(parts), self.more_body
                if more_body:
                    connection.advance()
                return {"type": "http.request", "body": body, "more_body": more_body}
            self.news.clear()
            await self.news.wait()
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
        if (
            not connection.transport.is_closing()
        ):  # else its caller has closed its side, and is taken for one that left
            parts = (head, b"" if self._is_head else message["body"])
            connection.transport.writelines(
                [part for part in parts if part]
            )  # asyncio would try for ever to send b""
        if not message.get("more_body", False):
            self.complete = True
            self.news.set()
            connection.answered(self)

    def _answer_head(self, status: int, headers: Iterable[Header]) -> bytes:
        """Return the head of the answer; the connection ends if more of a body comes than is worth
        reading.
        """
        connection, named = self._connection, dict(headers)
        closes = (
            connection.is_refused
            or connection.connections.is_ending
            or b"close" in named.get(b"connection", b"")
        )
        is_worth_reading = self._may_discard and status != HTTPStatus.REQUEST_TIMEOUT
        has_end = b"content-length" in named or status in (
            HTTPStatus.NO_CONTENT,
            HTTPStatus.NOT_MODIFIED,
        )
        self.keep_alive = (
            self.keep_alive and has_end and not closes and (is_worth_reading or not self.more_body)
        )
        others = [header for header in headers if header[0] != b"connection"]
        if self.keep_alive and self._names_keep_alive:
            others.append((b"connection", b"keep-alive"))
        return head_of(
            status, connection.state.default_headers + others, closes=not self.keep_alive
        )


def head_of(status: int, headers: Iterable[Header], *, closes: bool) -> bytes:
    """Return the head of an answer; raises `RuntimeError` if a header holds a line break."""
    lines = [_STATUS_LINES[status], *[b"%b: %b" % (name, value) for name, value in headers]]
    head = b"\r\n".join([*lines, *[b"connection: close"] * closes, b"", b""])
    if head.count(b"\n") + head.count(b"\r") != 2 * (len(lines) + closes + 1):
        raise RuntimeError("a header with a line break")
    return head


class Connection(asyncio.BufferedProtocol):
    """A connection, as uvicorn's `Config(http=...)` takes one: of uvicorn it reads its
    configuration and `state`.

    Attributes:
        left: done when the socket is closed.
        refused_at: seconds of the application's clock at which it last refused a request here for
        want of room.
        is_refused: nothing that arrives now is parsed.
        exchange: the last request, which is being answered, or whose body is being discarded, until
        that has ended.
        drained: set once the caller reads its answers again; None while it does.
        head: what has come of a request's head that has not ended.
    """

    def __init__(
        self, connections: "Connections", config: Config, server_state: ServerState, **_: object
    ) -> None:
        self.connections = connections
        self.state = server_state
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.refused_at = float("-inf")
        self.is_refused = False
        self.exchange: Exchange | None = None
        self.drained: asyncio.Event | None = None
        self._loop = asyncio.get_running_loop()
        self._app: Any = config.loaded_app
        self._held = b""
        self._is_reading = True
        self._unread = 0  # bytes of answers when `check` last saw the caller read
        self._new_head()

    # As the socket's protocol:

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # sockets have no other
        """Begin to wait for a request, if there is room for one connection more."""
        self.transport = transport
        self._scope: Scope = {
            **_SCOPE,
            "server": get_local_addr(transport),
            "client": get_remote_addr(transport),
        }
        own = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_NOTSENT_LOWAT") and own.family != socket.AF_UNIX:
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self._wait(HEAD_SECONDS)
        self.state.connections.add(self)  # type: ignore[arg-type]  # what uvicorn shuts down, and waits for
        if self.connections.is_ending:
            self.shutdown()
        self.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell uvicorn and the application that the caller is gone."""
        self.state.connections.discard(self)
        self.connections.open.pop(self, None)
        self.connections.ending.discard(self)
        self.is_refused, self._held = True, b""
        self.left.set_result(None)
        del self._parser  # which holds the connection
        self.resume_writing()
        if self.exchange is not None:
            self.exchange.news.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self.connections.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse bytes as far as they can be taken now."""
        if not self.is_refused:
            data = bytes(self.connections.buffer[:nbytes])
            self._held = self._held + data if self._held else data
            self.advance()

    def pause_writing(self) -> None:
        """Begin to watch a caller that does not read its answers."""
        self._since, self._unread = self._loop.time(), self.unsent_bytes
        self.drained = asyncio.Event()
        self.connections.app.answer_room.add_reader(self)

    def resume_writing(self) -> None:
        """Watch a caller that reads again no longer."""
        if self.drained is not None:
            self.connections.app.answer_room.remove_reader(self)
            self.drained.set()
            self.drained, self._since = None, self._loop.time()
            if not self.is_refused:
                self.advance()

    # It parses:

    def advance(self) -> None:
        """Take what has come: a head, and as much of its body as there is room for; read more if
        there is.
        """
        try:
            while self._held and not self.is_refused:
                exchange = self.exchange
                if exchange is None or (exchange.complete and not exchange.more_body):
                    if self.drained is not None:
                        break  # a second answer would wait in memory behind the unread one
                    self._take_head()
                elif exchange.more_body and exchange.is_wanted and exchange.waiting <= _PAUSE_BYTES:
                    self._held = exchange.take(self._held)
                    if exchange.more_body:
                        break
                else:
                    break
        except MalformedRequest as error:
            self.refuse(error)
        except httptools.HttpParserError:
            self.refuse(MalformedRequest("this is not HTTP/1.1"))
        waiting = self.exchange.waiting if self.exchange else 0
        reads = self.is_refused or len(self._held) + waiting <= _PAUSE_BYTES
        if reads != self._is_reading:
            self._is_reading = reads
            (self.transport.resume_reading if reads else self.transport.pause_reading)()

    def _new_head(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self.head, self._url, self._headers = b"", b"", list[Header]()
        self._keep_alive: bool | None = None  # before the head's end has come

    def on_url(self, url: bytes) -> None:
        """Keep a piece of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Keep what the parser forgets with the end of a request without a body."""
        self._keep_alive = self._parser.should_keep_alive()

    def _take_head(self) -> None:
        """Parse up to the end of a head, and begin its request.

        What is behind is not for its parser.
        """
        if not self.head:
            self._wait(HEAD_SECONDS)
        parsed, come = len(self.head), self.head + self._held
        blank = (
            0 if self._url else len(come) - len(come.lstrip(b"\r\n"))
        )  # lines before the request
        end = come.find(b"\r\n\r\n", max(blank, parsed - 3)) + 4
        self.head, self._held = (come[:end], come[end:]) if end > 3 else (come, b"")
        # No server need accept an offer of another protocol; Java's client makes one with each of
        # its first requests.
        with contextlib.suppress(httptools.HttpParserUpgrade):
            self._parser.feed_data(self.head[parsed : _MAX_HEAD_BYTES + 1])
        if len(self.head) > _MAX_HEAD_BYTES or len(self._headers) > _MAX_HEADERS:
            raise MalformedRequest(
                f"a head of more than {_MAX_HEAD_BYTES} bytes or {_MAX_HEADERS} headers"
            )
        if self._keep_alive is not None:
            self._begin(keep_alive=self._keep_alive)

    def _begin(self, *, keep_alive: bool) -> None:
        """Begin the request of a head that has come; raises `MalformedRequest`."""
        target = httptools.parse_url(self._url)
        if target.path is None or not target.path.isascii():
            raise MalformedRequest("the target of the request names no path")
        path = target.path.decode("ascii")
        scope: Scope = {
            **self._scope,
            "http_version": self._parser.get_http_version(),
            "method": self._parser.get_method().decode("ascii"),
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "raw_path": target.path,
            "query_string": target.query or b"",
            "headers": self._headers,
            "state": {"connection": self},
        }
        exchange = self.exchange = Exchange(self, scope, keep_alive=keep_alive)
        self._new_head()
        task = self._loop.create_task(exchange.run(self._app, scope))
        self.state.tasks.add(task)
        task.add_done_callback(self.state.tasks.discard)

    # It answers, and ends:

    @property
    def unsent_bytes(self) -> int:
        """Return the number of bytes of answers that wait in this process for the caller to read."""
        return self.transport.get_write_buffer_size()

    def give_way(self) -> None:
        """Drop the unsent bytes, and close the connection: its answer stays incomplete."""
        self.transport.abort()

    @property
    def request(self) -> Exchange | None:
        """Return the request that is being answered, if there is one."""
        return None if self.exchange is None or self.exchange.complete else self.exchange

    def _wait(self, seconds: float) -> None:
        """Wait for the caller, for so long from now on; other connections give way before this one."""
        self._since, self._patience = self._loop.time(), seconds
        if self in self.connections.open:
            self.connections.open.move_to_end(self)

    def answered(self, exchange: Exchange) -> None:
        """Go on after an answer that is written to its end."""
        if exchange.keep_alive and not (self.is_refused or self.connections.is_ending):
            self._wait(self.connections.idle_seconds)
            self.advance()
        elif exchange.more_body or self._held:  # more may come, and would reset the connection
            self._linger()
        else:
            self._wait(STALL_SECONDS)
            self.transport.close()

    def refuse(self, error: ServiceError) -> None:
        """Parse nothing more, and answer with a problem, or let the request answer whose body
        comes; then close.
        """
        self.is_refused, self._held = True, b""
        if self.request is not None:
            self.request.error = copy.copy(
                error
            )  # what was raised holds its frames, and they the exchange
            self.request.news.set()
        else:
            status, named, content = self.connections.app.refuse(error, self._headers)
            self.transport.writelines((head_of(status, named, closes=True), content))
            self._linger()

    def _linger(self) -> None:
        """Close the connection when its caller has, or soon; what still comes is discarded."""
        self.is_refused, self._held = True, b""
        self._wait(LINGER_SECONDS)
        if not self.transport.is_closing():
            with contextlib.suppress(OSError):  # its caller has reset it
                self.transport.write_eof()
            self.advance()

    def shutdown(self) -> None:
        """Close the connection after its answer, or soon: its request may be on the way."""
        self._loop.call_later(LAST_CALLERS_SECONDS, self._close_idle)

    def _close_idle(self) -> None:
        if self.request is None:  # else its answer closes it
            self.transport.close()

    def check(self, now: float) -> None:
        """End the connection if a head is late, or if its caller is idle, or reads nothing of an
        answer.
        """
        most = self._patience
        if self.drained is not None:
            unread, most = self.unsent_bytes, STALL_SECONDS
            if unread < self._unread:
                self._since, self._unread = now, unread
        elif self.request is not None and not self.transport.is_closing():
            return
        if now - self._since > most:
            if self.head and not (self.is_refused or self.drained):
                self.refuse(RequestTimeout(f"the head did not arrive within {HEAD_SECONDS:g} s"))
            else:
                self.transport.abort()  # to close it would wait for a caller that reads nothing


class Connections:
    """The connections of a process, on one event loop.

    Attributes:
        idle_seconds: how long a connection may be idle after an answer.
        open: those that have room, the one first that has done nothing for longest.
        ending: those beyond the limit: they were refused, or gave way.
        is_ending: each ends with its next answer, or a second after it was to be closed.
        protocol: returns that of a new connection, as uvicorn asks for it.
    """

    def __init__(
        self, app: Application, most: int = MAX_CONNECTIONS, *, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self.app = app
        self.idle_seconds = idle_seconds
        self.buffer = memoryview(bytearray(_READ))  # where any of them reads
        self.open: OrderedDict[Connection, None] = OrderedDict()
        self.ending: set[Connection] = set()
        self.is_ending = False
        self.protocol = partial(Connection, self)
        self._most = most

    def add(self, connection: Connection) -> None:
        """Add a connection; if there are too many, end the one that has waited longest for its
        caller, or refuse it.
        """
        if len(self.open) >= self._most:
            longest = next(
                (each for each in self.open if each.request is None or each.request.more_body),
                connection,
            )
            self.open.pop(longest, None)
            self.ending.add(longest)
            if len(self.ending) > _MOST_ENDING or (
                longest is not connection and longest.request is None
            ):
                longest.transport.abort()
            elif longest is connection:
                longest.refuse(ReceivingFull(f"all {self._most} connections are in use"))
            else:
                longest.refuse(
                    RequestTimeout(
                        "the body came too slowly while others waited for its connection"
                    )
                )
        if connection not in self.ending:
            self.open[connection] = None

    async def watch(self) -> None:
        """Check every connection each second, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            for connection in [*self.open, *self.ending]:
                connection.check(asyncio.get_running_loop().time())


def connection_of(scope: Scope) -> Connection | None:
    """Return the connection that a request came over; None under another server."""
    connection: Connection | None = scope.get("state", {}).get("connection")
    return connection
