"""One connection: parses requests, starts their tasks, and closes when a timer or a limit says."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import fcntl
import re
import socket
import sys
import termios
from typing import TYPE_CHECKING, Any, Final

import httptools
from starlette.types import Scope
from uvicorn import Config
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from service.draining import LAST_CALLERS_SECONDS
from service.errors import MalformedRequest, RequestTimeout, ServiceError
from service.http.exchange import Exchange, RequestHeaders, encode_headers

if TYPE_CHECKING:
    from service.http.connections import Connections

HEADER_SECONDS: Final = 30.0
"""Longest time for the arrival of a request's headers."""

STALL_SECONDS: Final = 30.0
"""Time in which a client must read some bytes of its answer."""

LAST_STALL_SECONDS: Final = 2.0
"""The same while the server stops."""

LINGER_SECONDS: Final = 10.0
"""Time to read and discard the rest of a refused body.

Closing at once would reset the connection, and the client might lose the answer.
"""

# Bytes of a body that wait for the application, from which the socket is not read.
_PAUSE_BYTES = 64 << 10
# Bytes of an answer that the kernel takes before it sends them; its default is 2.5 MiB.
_UNSENT_BYTES = 128 << 10
_SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "scheme": "http",
    "root_path": "",
}

# First bytes from clients of other protocols, and the messages to them.
_OTHER_PROTOCOLS: Final = (
    (b"\x16\x03", "this port does not speak TLS: call http://, or let a proxy end TLS"),
    (b"PRI * HTTP/2.0", "this is HTTP/2: speak HTTP/1.1 to this port, or call another port"),
    (b"PROXY ", "this is the PROXY protocol: turn it off in the load balancer"),
    (b"\r\n\r\n\0\r\nQUIT", "this is the PROXY protocol: turn it off in the load balancer"),
)

# A target with a space or a byte beyond ASCII in it, which the parser takes for another protocol.
_UNENCODED: Final = re.compile(rb"[A-Z]+ [!-~]+(?:[\x80-\xff]| [^\r\n]+ HTTP/)")


def _reason(received: bytes, error: Exception) -> str:
    """Return the message about bytes that are not request headers of HTTP/1.1."""
    for start, message in _OTHER_PROTOCOLS:
        if received.startswith(start):
            return message
    if _UNENCODED.match(received):
        return (
            "percent-encode spaces and characters beyond ASCII in the address, or send the "
            "parameter as a form field"
        )
    method = received.partition(b" ")[0]
    if method.isalpha() and not method.isupper():
        return f"methods are upper case: {method.upper().decode():.20}"
    return f"this is not HTTP/1.1: {error}"


class HttpConnection(asyncio.BufferedProtocol):
    """A connection, in the form that uvicorn's `Config(http=...)` expects.

    It reads uvicorn's configuration. Its connections and tasks are in uvicorn's `state`, because
    `uvicorn.Server.shutdown` waits for those.

    Attributes:
        left: done when the socket is closed.
        caller: name of the last caller; its address until the application sets another name.
        refused_at: reading of the application's clock when the last refusal that
            `service.web.refusal_pace` delayed is due.
        is_refused: whether to discard all further bytes.
        exchange: the last request, until its answer is complete and its body has ended.
        request_headers: headers of the next request, as far as they have arrived.
        drained: set when the client reads its answers again; None while it keeps up.
        is_pipelining: whether the next request is queued, see `Connections.begin_later`.
    """

    def __init__(
        self, connections: Connections, config: Config, server_state: ServerState, **_: object
    ) -> None:
        self.connections = connections
        self.state = server_state
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.caller = ""
        self.refused_at = float("-inf")
        self.is_refused = False
        self.exchange: Exchange | None = None
        self.drained: asyncio.Event | None = None
        self.is_pipelining = False
        self._loop = asyncio.get_running_loop()
        self._app: Any = config.loaded_app
        self._held = b""
        self._is_reading = True
        self._unread = 0  # bytes of answers when `check` last saw the client read
        self.request_headers = RequestHeaders()

    # The socket's protocol.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # sockets have no other
        """Start the timer for the first request, and ask for room for this connection."""
        self.transport = transport
        self._scope: Scope = {
            **_SCOPE,
            "server": get_local_addr(transport),
            "client": get_remote_addr(transport),
        }
        self.caller = (self._scope["client"] or ("",))[0]
        listener = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_NOTSENT_LOWAT") and listener.family != socket.AF_UNIX:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self._wait(HEADER_SECONDS)
        # uvicorn shuts these connections down, and waits for them.
        self.state.connections.add(self)  # type: ignore[arg-type]
        if self.connections.ending_since is not None:
            self.shutdown()
        self.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell uvicorn and the application that the client has disconnected."""
        self.state.connections.discard(self)
        self.connections.open.pop(self, None)
        self.connections.ending.discard(self)
        self.is_refused = True
        self._held = b""
        self.left.set_result(None)
        self.request_headers.close()
        self.resume_writing()
        if self.exchange is not None:
            self.exchange.news.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next read."""
        return self.connections.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse received bytes as far as there is room for them."""
        if not self.is_refused:
            data = bytes(self.connections.buffer[:nbytes])
            self._held = self._held + data if self._held else data
            self.advance()

    def pause_writing(self) -> None:
        """Start watching a client that does not read its answers."""
        self._since = self._loop.time()
        self._unread = self.unsent_bytes
        self.drained = asyncio.Event()
        self.connections.app.answer_room.add_reader(self)

    def resume_writing(self) -> None:
        """Stop watching a client, because it reads its answers again."""
        if self.drained is not None:
            self.connections.app.answer_room.remove_reader(self)
            self.drained.set()
            self.drained = None
            self._since = self._loop.time()
            if not self.is_refused:
                self.advance()

    # Parsing.

    def advance(self) -> None:
        """Parse the held bytes as far as there is room; pause or resume reading from the socket."""
        try:
            while self._held and not self.is_refused:
                exchange = self.exchange
                if exchange is None or (exchange.complete and not exchange.more_body):
                    # A second answer would wait in memory behind an unread one.
                    if self.drained is not None or self.is_pipelining:
                        break
                    self._take_headers()
                elif exchange.more_body and exchange.is_wanted and exchange.waiting <= _PAUSE_BYTES:
                    self._held = exchange.take(self._held)
                    if exchange.more_body:
                        break
                else:
                    break
        except MalformedRequest as error:
            self.refuse(error)
        except httptools.HttpParserError as error:
            self.refuse(MalformedRequest(_reason(self.request_headers.received, error)))
        waiting = self.exchange.waiting if self.exchange else 0
        reads = self.is_refused or len(self._held) + waiting <= _PAUSE_BYTES
        if reads != self._is_reading:
            self._is_reading = reads
            if reads:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def _take_headers(self) -> None:
        """Parse request headers, and start the request once they are complete."""
        headers = self.request_headers
        if not headers.received:
            self._wait(HEADER_SECONDS)
        self._held = headers.take(self._held)
        if headers.keep_alive is None:
            return
        scope = headers.scope(self._scope)
        scope["state"] = {"connection": self}
        exchange = Exchange(self, scope, keep_alive=headers.keep_alive)
        self.exchange = exchange
        headers.clear()
        task = self._loop.create_task(exchange.run(self._app, scope))
        self.state.tasks.add(task)
        task.add_done_callback(self.state.tasks.discard)

    # Answers, and the end of the connection.

    @property
    def unsent_bytes(self) -> int:
        """Return the number of answer bytes that this process holds until the client reads them."""
        return self.transport.get_write_buffer_size()

    def give_way(self) -> None:
        """Drop the unsent bytes, and close the connection: its answer stays incomplete."""
        self.transport.abort()

    @property
    def request(self) -> Exchange | None:
        """Return the request with an incomplete answer, or None."""
        return None if self.exchange is None or self.exchange.complete else self.exchange

    def _wait(self, seconds: float) -> None:
        """Restart the idle timer, and move this connection to the end of the eviction order."""
        self._since = self._loop.time()
        self._patience = seconds
        if self in self.connections.open:
            self.connections.open.move_to_end(self)

    def answered(self, exchange: Exchange) -> None:
        """Parse the next request after a complete answer, or close the connection."""
        is_last = self.is_refused or self.connections.ending_since is not None
        if exchange.keep_alive and not is_last:
            self._wait(self.connections.idle_seconds)
            if self._held and not exchange.more_body:
                self.connections.begin_later(self)
            else:
                self.advance()
        elif exchange.more_body or self._held:  # bytes after a close would reset the connection
            self._linger()
        else:
            self._wait(STALL_SECONDS)
            self.transport.close()

    def refuse(self, error: ServiceError) -> None:
        """Stop parsing, answer with a problem, and close.

        If the body of a request is arriving, the request fails with the error instead.
        """
        self.is_refused = True
        self._held = b""
        if self.request is not None:
            # A raised error holds its frames, and these hold the exchange.
            self.request.error = copy.copy(error)
            self.request.news.set()
        else:
            status, headers, content = self.connections.app.refuse(
                error, self.request_headers.headers
            )
            self.transport.writelines((encode_headers(status, headers, closes=True), content))
            self._linger()

    def _linger(self) -> None:
        """Discard further bytes until the client closes the connection, or the timer ends it."""
        self.is_refused = True
        self._held = b""
        self._wait(LINGER_SECONDS)
        if not self.transport.is_closing():
            with contextlib.suppress(OSError):  # the client has reset the connection
                self.transport.write_eof()
            self.advance()

    def shutdown(self) -> None:
        """Close the connection after its answer, or once a last request may have arrived."""

        def close_idle() -> None:
            if self.request is None:  # otherwise the end of the answer closes it
                self.transport.close()

        self._loop.call_later(LAST_CALLERS_SECONDS, close_idle)

    def check(self, now: float) -> None:
        """End the connection if request headers are late, or the client is idle or does not read.

        Args:
            now: time on the clock of the event loop.
        """
        longest = self._patience
        since = self._since
        if self.drained is not None or self.transport.is_closing():
            longest = STALL_SECONDS
            unread = self.unsent_bytes + _sent_bytes(self.transport)
            if unread < self._unread:
                since = now
                self._since = now
            self._unread = unread
        elif self.request is not None:
            return
        if self.connections.ending_since is not None:
            longest = min(longest, LAST_STALL_SECONDS)
            since = max(since, self.connections.ending_since)
        if now - since <= longest:
            return
        if self.request_headers.received and not (self.is_refused or self.drained):
            self.refuse(
                RequestTimeout(f"the request headers did not arrive within {HEADER_SECONDS:g} s")
            )
        else:
            self.transport.abort()  # a close would wait for a client that reads nothing


def _sent_bytes(transport: asyncio.Transport) -> int:
    """Return the number of bytes that the kernel holds until the client's kernel has them."""
    sender = transport.get_extra_info("socket")
    with contextlib.suppress(OSError, ValueError):  # the socket is closed
        count = fcntl.ioctl(sender.fileno(), termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(count, sys.byteorder)
    return 0


def connection_of(scope: Scope) -> HttpConnection | None:
    """Return the connection of a request; None under another server."""
    connection: HttpConnection | None = scope.get("state", {}).get("connection")
    return connection
