"""HTTP/1.1 over sockets: uvicorn's own protocol behind a guard, and a server that drains before it stops.

    socket --bytes--> Guard --bytes--> uvicorn's protocol --request--> _Request --> the application
    socket <--bytes-- Guard <--bytes-- uvicorn's protocol <--answer--- _Request <-- the application

uvicorn parses and frames. The guard bounds heads, framing, time, unread answers, and the number of connections, and
answers what is no valid request with a problem document. Bodies are bounded by the application that reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from http import HTTPStatus
from typing import Any, Final, Protocol

import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from service.errors import MalformedRequest, ReceivingFull, RequestTimeout, ServiceError
from service.lifecycle import Lifecycle, exit_now, log_end, stop_signals
from service.settings import Settings

logger = logging.getLogger(__name__)

Header = tuple[bytes, bytes]

MAX_CONNECTIONS: Final = 2048
"""Connections of a process: eight for each place of the usual queue."""

HEAD_SECONDS: Final = 30.0
STALL_SECONDS: Final = 30.0
"""Time after which a caller who reads nothing of its answer loses the connection."""

LINGER_SECONDS: Final = 10.0
"""Time for which the rest of a refused body is discarded: closed at once, the connection would be reset, and the caller
might never see its answer."""

DISCARDED_BYTES: Final = 1 << 20
"""Length of a body that is read to its end after a refusal: a new connection costs both sides more."""

_KEEP_ALIVE_SECONDS = 75  # load balancers keep idle connections for about a minute: the side that answers, longer
_LAST_CALLERS_SECONDS = 1.0  # after the listener is closed, for who was let in just before
_OTHER_FILES = 128
_MOST_REFUSED = 64  # connections beyond the limit whose refusal is on its way

_MAX_HEAD_BYTES = 64 << 10
_MAX_HEADERS = 256  # each costs thirty times its shortest form in memory
_PIECE = 8 << 10  # bytes of what is no head with its body that uvicorn's protocol gets at once
_READ = 128 << 10
_PAUSE_BYTES = 64 << 10  # of a body that the application has not read: uvicorn pauses beyond
_CHUNK_FRAMING = 6  # bytes of a small chunk
_UNSENT_BYTES = 128 << 10  # of a connection's answers, in the kernel; by itself it takes 2.5 MiB

_OFFER = re.compile(rb"\nUpgrade:", re.IGNORECASE)
"""A header that is renamed, as the parser takes a body behind it for another protocol.

Java's client has it with each of its first requests, and no server need accept an offer.
"""

_LENGTH = re.compile(rb"\nContent-Length:[ \t]*(\d{1,18})", re.IGNORECASE)

_CONNECTION = "connection"


class Application(Protocol):
    """The application behind a server."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""

    def refuse(self, error: ServiceError, headers: Iterable[Header]) -> tuple[int, list[Header], bytes]:
        """Count bytes that never become a request, of which `headers` came, and return status, headers and body."""


def connection_of(scope: Scope) -> Guard | None:
    """Return the connection that a request came over; None under another server."""
    connection: Guard | None = scope.get("state", {}).get(_CONNECTION)
    return connection


class _Request:
    """A request while the application answers it: what is unread of its body, and whether its connection goes on."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self._guard, self._scope, self._receive, self._send = guard, scope, receive, send
        self._headers = dict(scope["headers"])
        self._size = 14 + len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"])
        self._size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        self._length = int(self._headers.get(b"content-length", 0))
        self._chunked = b"transfer-encoding" in self._headers
        self._may_discard = not (self._chunked or self._length > DISCARDED_BYTES or b"expect" in self._headers)
        self._content = 0
        self._start: Message = {}
        self.more_body = self._chunked or self._length > 0
        self.answered = False
        self.error: ServiceError | None = None  # of its framing: uvicorn parses no more of it

    def head_error(self) -> MalformedRequest | None:
        """Return the error of a head that is too large, or that a proxy may read in another way."""
        names = [name for name, _ in self._scope["headers"]]
        version, hosts = self._scope["http_version"], names.count(b"host")
        if self._size > _MAX_HEAD_BYTES or len(names) > _MAX_HEADERS:
            return MalformedRequest(f"a head of more than {_MAX_HEAD_BYTES} bytes or {_MAX_HEADERS} headers")
        if version not in ("1.0", "1.1"):
            return MalformedRequest(f"HTTP/{version}: this server speaks HTTP/1.1")
        if hosts > 1 or (version == "1.1" and hosts == 0):
            return MalformedRequest(f"{hosts} Host headers: expected one")
        if self.more_body and b"upgrade" in self._headers:  # in two reads
            return MalformedRequest("Upgrade: this server speaks HTTP/1.1")
        coding = self._headers.get(b"transfer-encoding", b"chunked").strip().lower()
        if coding != b"chunked" or names.count(b"transfer-encoding") > (version == "1.1"):
            return MalformedRequest("Transfer-Encoding: only chunked is understood, once, and in HTTP/1.1")
        return None

    def overhead_left(self) -> int:
        """Return the overhead of the connection after the answer: below 0 by what is still to be discarded."""
        return min(0, self._guard.overhead - self._size + self._content - self._length) if self.more_body else 0

    async def receive(self) -> Message:
        """Return the next message of the body; raises `MalformedRequest` if its framing is broken, or excessive."""
        message = await self._receive()
        if self.error is not None:
            raise self.error
        if message["type"] == "http.request":
            size = len(message["body"])
            self._content += size
            self._guard.overhead -= size
            self.more_body = message["more_body"]
            if not self.more_body:
                self._guard.connections.wait(self._guard, waits=False)
            chunks = (self._guard.overhead - self._size) // _CHUNK_FRAMING
            if self._chunked and chunks > 64 + self._content // 32:
                self._guard.is_closing_soon = True
                raise MalformedRequest("more than 32 chunks in a KiB of the body")
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer; the connection ends with it if more of the body comes than is worth reading."""
        if self.error is not None:
            if message["type"] == "http.response.start":
                self._start = message
            elif not self._guard.transport.is_closing():
                self._guard.answer(self._start["status"], self._start["headers"], message["body"])
        elif message["type"] == "http.response.start":
            self.answered = True
            is_worth_it = self._may_discard and message["status"] != HTTPStatus.REQUEST_TIMEOUT
            if self._guard.is_closing_soon or (self.more_body and not is_worth_it):
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            self._guard.holds_head = True
            await self._send(message)
        else:
            await self._send(message)
            self._guard.flush()


class Guard(asyncio.BufferedProtocol, asyncio.Transport):
    """A connection: the protocol of a socket, and the transport of uvicorn's protocol.

    Attributes:
        left: done when the caller is gone.
        refused_at: seconds of the application's clock at which it last refused a request here for want of room.
        overhead: bytes since the last request that are no content of a body, as far as the application has read it.
        connections: of which it is one.
        transport: of the socket.
        is_closing_soon: nothing that arrives now is parsed.
        holds_head: what is written next is a head, which goes out in one packet with the begin of its body.
    """

    def __init__(self, connections: Connections, protocol: Callable[[dict[str, Any]], asyncio.Protocol]) -> None:
        super().__init__()
        self.connections = connections
        self._loop = asyncio.get_running_loop()
        self._protocol: asyncio.Protocol | None = protocol({_CONNECTION: self})
        self._request: _Request | None = None
        self._is_parsing = self._is_invalid = self._is_paused = False
        self._is_in_head = True
        self._held = b""
        self._message_left = 0  # bytes of a head and its body that uvicorn's protocol has not got
        self._waits_since: float | None = self._loop.time()  # for the end of a head
        self._unread: tuple[float, int] | None = None  # since when so many bytes of an answer are
        self.left: asyncio.Future[None] = self._loop.create_future()
        self.refused_at = float("-inf")
        self.overhead = 0
        self.is_closing_soon = self.holds_head = False
        self._head = b""

    # As the socket's protocol:

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # sockets have no other
        """Begin to wait for a request, if there is room for one connection more."""
        self.transport = transport
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        if self._protocol is not None:
            self._protocol.connection_made(self)
        self.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell uvicorn and the application that the caller is gone."""
        self.connections.remove(self)
        self._release(exc)
        self.left.set_result(None)

    def _release(self, exc: Exception | None = None) -> None:
        self.is_closing_soon, self._held = True, b""
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self.connections.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Hand bytes to uvicorn's protocol, as far as it takes them."""
        if self._is_invalid or self.is_closing_soon:
            return
        self._held += self.connections.buffer[:nbytes]
        if self._is_paused:
            self.transport.pause_reading()
        else:
            self._feed()

    def _feed(self) -> None:
        """Feed uvicorn's protocol, which starts a request's task when its head is complete, until it pauses.

        It gets a head together with its body, and all else in small pieces: pipelined requests cost a hundred times
        their bytes until it pauses, and so do bodies of tiny chunks. The application may refuse these by their head.
        """
        while self._held and not (self._is_paused or self._is_invalid or self.is_closing_soon):
            is_first = self._is_in_head
            if self._request is None and self._waits_since is None:
                self._waits_since = self._loop.time()
            if self._is_in_head and not self._message_left:
                self._look_at_head()
            size = max(min(self._message_left, _READ), _PIECE)
            piece, self._held = self._held[:size], self._held[size:]
            self._message_left = max(0, self._message_left - len(piece))
            self.overhead += len(piece)
            self._is_parsing = True
            if self._protocol is not None:
                self._protocol.data_received(piece)
            self._is_parsing = False
            if is_first and self._held and not (self._is_in_head or self._message_left):
                self._loop.call_soon(self._feed)  # the request's task runs before
                break
        if self._is_invalid or self.overhead > _MAX_HEAD_BYTES:
            self._loop.call_soon(self._check_bytes)  # a request whose head is here has begun by then

    def _look_at_head(self) -> None:
        """Rename the offer in a head, and note how long the head and its body are."""
        end = self._held.find(b"\r\n\r\n") + 4
        head = self._held[:end] if end > 3 else self._held
        if b"\nupgrade:" in head.lower():
            self._held = _OFFER.sub(b"\nX-Offer:", head) + self._held[len(head) :]
        if end > 3:
            length = _LENGTH.search(head)
            self._message_left = end + (int(length[1]) if length else 0)
            self._is_in_head = False

    def _check_bytes(self) -> None:
        if self._is_invalid:
            self.refuse(MalformedRequest("this is not HTTP/1.1"))
            return
        unread = 0 if self._is_in_head else _PAUSE_BYTES + (_READ if self._is_paused else 0)
        if self.overhead > _MAX_HEAD_BYTES + unread:
            self.refuse(MalformedRequest(f"more than {_MAX_HEAD_BYTES} bytes that are no body"))

    def pause_writing(self) -> None:
        """Begin to watch a caller that does not read its answers."""
        self._unread = self._loop.time(), self.transport.get_write_buffer_size()
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Watch a caller that reads again no longer."""
        self._unread = None
        if self._protocol is not None:
            self._protocol.resume_writing()

    # As uvicorn's transport:

    def get_extra_info(self, name: str, default: object = None) -> Any:
        """Return what the socket's transport knows."""
        return self.transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Return whether nothing more is sent."""
        return self._protocol is None or self.transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send a part of an answer. What uvicorn writes while it parses is its refusal of what it parses."""
        if self._is_parsing:
            self._is_invalid = True
        elif self.transport.is_closing():  # the caller has closed its side, and is taken for one that left
            self.holds_head, self._head = False, b""
        elif self.holds_head:
            self._head, self.holds_head = bytes(data), False
        elif self._head:
            head, self._head = self._head, b""
            self.transport.writelines((head, data))
        else:
            self.transport.write(data)

    def flush(self) -> None:
        """Send a head that has no body."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        """Close the connection; what its caller is still sending is discarded before."""
        if self._is_parsing or self._protocol is None:
            return
        self.flush()
        if self._request is not None and self._request.more_body:
            self._linger()
        elif self._request is None and self.connections.is_ending:  # its request may be on the way
            self._loop.call_later(_LAST_CALLERS_SECONDS, self._close_idle)
        else:
            self.transport.close()

    def _close_idle(self) -> None:
        if self._request is None:  # else its answer closes it
            self.transport.close()

    def pause_reading(self) -> None:
        """Hand nothing on for now; the socket is read no more when more has come."""
        self._is_paused = True

    def resume_reading(self) -> None:
        """Hand on what has come meanwhile, and read again."""
        self._is_paused = False
        self.transport.resume_reading()
        if self._held:
            self._loop.call_soon(self._feed)

    # As the connection of requests:

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer a request."""
        request = _Request(self, scope, receive, send)
        error = request.head_error()
        if error is not None:
            self.refuse(error, scope["headers"])
        if self.is_closing_soon:
            self._release()
            return
        self._request, self._waits_since, self._is_in_head = request, None, False
        self.connections.wait(self, waits=request.more_body)
        try:
            await self.connections.app(scope, request.receive, request.send)
        finally:
            if self._request is request:  # else uvicorn has started the next, which came before the answer
                self._request, self._is_in_head = None, True
                self.overhead = request.overhead_left()
                self.connections.wait(self)
            if self.is_closing_soon and self._protocol is not None:
                self.transport.close()

    def refuse(self, error: ServiceError, headers: Iterable[Header] = ()) -> None:
        """Parse nothing more, and answer with a problem, or let the request answer that is under way, then close."""
        if self.is_closing_soon:
            return
        self.is_closing_soon = True
        if self._request is None:
            self.answer(*self.connections.app.refuse(error, headers))
        elif self._request.more_body and not self._request.answered:
            self._request.error = error
            self._release()  # the application hears of it when it reads on

    def answer(self, status: int, headers: Iterable[Header], content: bytes) -> None:
        """Send the last answer of this connection, without uvicorn."""
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode(), b"connection: close"]
        lines += [name + b": " + value for name, value in headers]
        self.transport.write(b"\r\n".join([*lines, b"", content]))
        self._linger()

    def give_way(self) -> None:
        """End the connection for another."""
        if self._request is None:
            self.connections.remove(self)
            self.transport.abort()
        else:
            self.refuse(RequestTimeout("the body came too slowly while others waited for its connection"))

    def _linger(self) -> None:
        self._release()
        self.connections.wait(self)
        if not self.transport.is_closing():
            self.transport.write_eof()
            self.transport.resume_reading()
            self._loop.call_later(LINGER_SECONDS, self.transport.abort)

    def check(self, now: float) -> None:
        """End the connection if a head is late, or if its caller reads nothing of an answer."""
        if self._unread is not None:
            since, size = self._unread
            if self.transport.get_write_buffer_size() < size:
                self._unread = now, self.transport.get_write_buffer_size()
            elif now - since > STALL_SECONDS:
                self.transport.abort()
        elif self._waits_since is not None and now - self._waits_since > HEAD_SECONDS:
            if self.overhead > 0:
                self.refuse(RequestTimeout(f"the head did not arrive within {HEAD_SECONDS:g} s"))
            else:
                self.close()


class Connections:
    """The connections of a process, on one event loop.

    Attributes:
        app: that they serve.
        buffer: where any of them reads.
        waiting: those that wait for a request, or for its body, the longest first.
        is_ending: no more are let in, and each ends with its next answer, or a second after it was to be closed.
    """

    def __init__(self, app: Application, most: int = MAX_CONNECTIONS) -> None:
        self.app = app
        self.buffer = memoryview(bytearray(_READ))
        self.waiting: dict[Guard, None] = {}
        self.open: set[Guard] = set()
        self.is_ending = False
        self._most = most

    def protocol(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], **_: object
    ) -> Guard:
        """Return the protocol of a new connection, as uvicorn asks for it."""
        return Guard(self, lambda connection: HttpToolsProtocol(config, server_state, app_state | connection))

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection, as uvicorn's application."""
        guard = connection_of(scope)
        if guard is None:
            await self.app(scope, receive, send)
        else:
            await guard.serve(scope, receive, send)

    def add(self, guard: Guard) -> None:
        """Add a connection; if there are too many, end the one that has waited longest for its caller, or refuse it."""
        is_full = len(self.open) >= self._most
        if is_full and self.waiting:
            next(iter(self.waiting)).give_way()
            is_full = False
        self.open.add(guard)
        if len(self.open) > self._most + _MOST_REFUSED:
            guard.transport.abort()
        elif is_full:
            guard.refuse(ReceivingFull(f"all {self._most} connections are in use"))
        else:
            self.wait(guard)

    def wait(self, guard: Guard, *, waits: bool = True) -> None:
        """Note that a connection waits for its caller from now on, or that it does not."""
        self.waiting.pop(guard, None)
        if waits and guard in self.open:
            self.waiting[guard] = None

    def remove(self, guard: Guard) -> None:
        """Forget a connection that has ended."""
        self.open.discard(guard)
        self.waiting.pop(guard, None)

    async def watch(self) -> None:
        """Check every connection each second, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            self.check(loop.time())

    def check(self, now: float) -> None:
        """Check every connection at this time of the event loop."""
        for guard in list(self.open):
            guard.check(now)


def connection_limit(configured: int = MAX_CONNECTIONS) -> int:
    """Return how many connections this process may hold: `configured`, or fewer if the system allows fewer open files.

    The limit of open files is raised as far as needed, within what the system allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = configured + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return configured
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, allowed - _OTHER_FILES)


def address_family(host: str) -> socket.AddressFamily:
    """Return the family of a host's address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Server:
    """One web process: uvicorn, with the shutdown that API clients need.

    SIGTERM or SIGINT: for `drain_delay` seconds it goes on serving, but is not ready; then it stops listening, finishes
    what it accepted, refuses what still comes, and returns, at the latest after `drain_timeout`. A second SIGTERM or
    SIGINT ends the process at once. SIGHUP stops it, too, unless `on_hang_up` handles it. By itself uvicorn would close
    its listener at the first SIGTERM, and end with 143.

    Args:
        beside: started with the server and cancelled at its end.
        on_hang_up: returns whether it has handled SIGHUP.
        is_supervised: the supervisor's signal drains, however often it comes, and SIGHUP is the supervisor's to handle.
    """

    def __init__(
        self,
        app: Application,
        settings: Settings,
        lifecycle: Lifecycle,
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
        on_hang_up: Callable[[], bool] = lambda: False,
        *,
        is_supervised: bool = False,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._settings = settings
        self._lifecycle = lifecycle
        self._beside = beside
        self._on_hang_up = on_hang_up
        self._is_supervised = is_supervised
        self._hung_up = False
        self._let_in_last: set[asyncio.Task[Any]] = set()  # the loop itself keeps no task alive
        self.connections = Connections(app, connection_limit(max_connections))
        config = uvicorn.Config(
            self.connections.serve,
            host=settings.host,
            port=settings.port,
            http=self.connections.protocol,  # type: ignore[arg-type]  # it is called as a class is
            interface="asgi3",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",  # its warnings repeat what callers send
            access_log=False,
            server_header=False,
            proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,  # uvicorn's own variable: X-Forwarded-For is believed
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=None,  # uvicorn would cut requests off; `_give_up` ends the process instead
        )
        self._uvicorn = uvicorn.Server(config)

    @property
    def is_listening(self) -> bool:
        """Return whether the server has started."""
        return self._uvicorn.started

    @property
    def port(self) -> int:
        """Return the port of the started server, which differs from the setting when that is 0."""
        port: int = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        return port

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal or `stop`, on `sockets` if they are given."""
        with asyncio.Runner(loop_factory=self._uvicorn.config.get_loop_factory()) as runner:
            runner.run(self.serve(sockets))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on the running event loop, see `run`."""
        loop, numbers = asyncio.get_running_loop(), stop_signals()
        serving = loop.create_task(self._uvicorn.serve(sockets))
        beside = [loop.create_task(each()) for each in (self._beside, self.connections.watch) if each is not None]
        await asyncio.sleep(0)  # uvicorn has taken the signals: they are taken from it
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await serving
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
            for task in beside:
                task.cancel()
        self._log_end()

    def stop(self, exit_code: int) -> None:
        """End the process in order, without the delay for load balancers: there is nothing left to serve."""
        self._lifecycle.exit_code = exit_code
        self._begin_to_stop(0.0)

    def drain(self) -> None:
        """Serve for the delay, then refuse new work, and stop when all accepted requests are answered."""
        if not self._lifecycle.stopping:
            self._begin_to_stop(self._settings.drain_delay)

    def _begin_to_stop(self, delay: float) -> None:
        self._lifecycle.stopping = True
        loop = asyncio.get_running_loop()
        loop.call_later(delay, self._stop_listening)
        loop.call_later(self._settings.drain_timeout, self._give_up)

    def _listening(self) -> Sequence[asyncio.Server]:
        """Return what listens; uvicorn has none before it has started, and a start may fail before that."""
        return getattr(self._uvicorn, "servers", ())

    def _stop_listening(self) -> None:
        loop = asyncio.get_running_loop()
        for server in self._listening():
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
        loop.call_soon(self._close_listeners)  # who was just accepted has a protocol by then: a closed server drops it

    def _close_listeners(self) -> None:
        self.connections.is_ending = True
        self._uvicorn.should_exit = True  # which uvicorn sees, and closes idle connections, within 0.1 s
        asyncio.get_running_loop().call_later(_LAST_CALLERS_SECONDS, setattr, self._lifecycle, "draining", True)
        for server in self._listening():
            listeners = [socket.socket(fileno=os.dup(listener.fileno())) for listener in server.sockets]
            server.close()
            for listener in listeners:
                self._let_in(listener)

    def _let_in(self, listener: socket.socket) -> None:
        """Accept who is connected by the system, and close the listener: the system would reset their connections."""
        loop, config, state = asyncio.get_running_loop(), self._uvicorn.config, self._uvicorn.server_state
        listener.setblocking(False)
        with listener, contextlib.suppress(OSError):  # there is nobody left, or no file for one more
            while True:
                connection, _ = listener.accept()
                task = loop.create_task(
                    loop.connect_accepted_socket(
                        lambda: self.connections.protocol(config, state, self._uvicorn.lifespan.state), connection
                    )
                )
                self._let_in_last.add(task)
                task.add_done_callback(self._let_in_last.discard)

    def _give_up(self) -> None:
        logger.warning("not everything was answered within %g s: ending", self._settings.drain_timeout)
        self._log_end()
        exit_now(self._lifecycle.exit_code)

    def _log_end(self) -> None:
        if not self._is_supervised:  # else the supervisor tells it of all
            log_end(self._lifecycle.answered, self._lifecycle.refused)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._is_supervised:
            if number != signal.SIGHUP:
                self.drain()
        elif not self._lifecycle.stopping:
            if number == signal.SIGHUP and self._on_hang_up():
                return
            logger.info("%s: stopping", number.name)
            self.drain()
        elif number != signal.SIGHUP and not self._hung_up:
            logger.warning("%s again: ending at once", number.name)
            exit_now(128 + number)
        # systemd may send SIGHUP together with SIGTERM, and terminals send it twice: both ask for one stop.
        self._hung_up = number == signal.SIGHUP
