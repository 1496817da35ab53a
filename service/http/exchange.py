"""One request and its answer: its headers, the body for the application, and its answer."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import re
import urllib.parse
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import httptools
from starlette.types import Message, Scope

from service.errors import MalformedRequest, ServiceError
from service.http.application import Header, HttpApplication
from service.http.chunked import ChunkedBody

if TYPE_CHECKING:
    from service.http.connection import HttpConnection

logger = logging.getLogger(__name__)

_MAX_HEADER_BYTES = 64 << 10
_MAX_HEADERS = 256  # a short header takes about 30 times its bytes in memory

_MAX_PATH_BYTES = 4096  # decoding 64 KiB of percent-escapes would hold the event loop for 15 ms

# Largest body that is read after a refusal: a new connection costs both sides more.
DISCARDED_BYTES: Final = 1 << 20

# The parser bounds a length, but not its leading zeros, and Python converts up to 4,300 digits.
_MAX_LENGTH_DIGITS = 20

_ABSOLUTE = re.compile(rb"[^/]+://([^/?#]*)")

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status} {status.phrase}".encode() for status in HTTPStatus
}


class RequestHeaders:
    """Parses request headers, of one request after the other.

    Attributes:
        received: received bytes of the headers.
        headers: names in lower case, and values.
        keep_alive: whether the connection stays open after the answer; None until all headers have
            arrived.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin with the next request."""
        self._parser = httptools.HttpRequestParser(self)
        self.received = b""
        self._url = b""
        self.headers = list[Header]()
        self.keep_alive: bool | None = None

    def close(self) -> None:
        """Drop the parser, which holds this object."""
        del self._parser

    def take(self, data: bytes) -> bytes:
        """Parse up to the end of the request headers, and return the bytes after them.

        The parser of the headers never sees the bytes after them.

        Raises:
            HttpParserError: the headers are not of HTTP/1.1.
            MalformedRequest: the headers are too long, or too many.
        """
        parsed = len(self.received)
        received = self.received + data
        blank = 0  # bytes of empty lines before the request
        if not self._url:
            blank = len(received) - len(received.lstrip(b"\r\n"))
        end = received.find(b"\r\n\r\n", max(blank, parsed - 3)) + 4
        if end <= 3:
            end = len(received)
        self.received = received[:end]
        # A server may ignore an offer of another protocol. Java's client makes one with each of its
        # first requests.
        with contextlib.suppress(httptools.HttpParserUpgrade):
            self._parser.feed_data(self.received[parsed : _MAX_HEADER_BYTES + 1])
        if end > _MAX_HEADER_BYTES or len(self.headers) > _MAX_HEADERS:
            raise MalformedRequest(
                f"the request headers have more than {_MAX_HEADER_BYTES} bytes "
                f"or {_MAX_HEADERS} fields"
            )
        return received[end:]

    def scope(self, scope_of_connection: Scope) -> Scope:
        """Return the ASGI scope of the request whose headers are complete.

        Raises:
            MalformedRequest: the target has no path, or one that is too long.
        """
        target = httptools.parse_url(self._url)
        if target.path is None or not target.path.isascii():
            raise MalformedRequest("the target of the request has no path in ASCII")
        if len(target.path) > _MAX_PATH_BYTES:
            raise MalformedRequest(f"the path of the request has more than {_MAX_PATH_BYTES} bytes")
        path = target.path.decode("ascii")
        absolute = _ABSOLUTE.match(self._url)
        if absolute is not None:  # its host counts, not the header's (RFC 9112, 3.2.2)
            self.headers = [
                (name, absolute[1] if name == b"host" else value) for name, value in self.headers
            ]
        return {
            **scope_of_connection,
            "http_version": self._parser.get_http_version(),
            "method": self._parser.get_method().decode("ascii"),
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "raw_path": target.path,
            "query_string": target.query or b"",
            "headers": self.headers,
        }

    # Called by the parser.

    def on_url(self, url: bytes) -> None:
        """Keep a piece of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Keep a flag that the parser forgets when a request without a body ends."""
        self.keep_alive = self._parser.should_keep_alive()


class Exchange:
    """A request and its answer, in the form of ASGI.

    Attributes:
        more_body: whether the end of the body is still to arrive.
        is_wanted: whether to parse the body. If the client waits for `100 Continue` or sends
            chunks, this is false until the application reads the body.
        waiting: number of received body bytes that the application has not read.
        chunks: the chunks of the body; None if the request declares its length.
        answered, complete: whether the answer has begun, and whether it is written to its end.
        keep_alive: whether the connection stays open after the answer.
        error: problem of the body, which stops its parsing.
        news: set when the application has to look at a change.

    Raises:
        MalformedRequest: a proxy may read the request headers differently.
    """

    def __init__(self, connection: HttpConnection, scope: Scope, *, keep_alive: bool) -> None:
        headers = dict(scope["headers"])
        version = scope["http_version"]
        hosts = [name for name, _ in scope["headers"]].count(b"host")
        codings = [
            value.strip().lower()
            for name, value in scope["headers"]
            if name == b"transfer-encoding"
        ]
        length = headers.get(b"content-length", b"0")
        expected = headers.get(b"expect", b"")
        if scope["method"] == "CONNECT" or version not in ("1.0", "1.1"):
            raise MalformedRequest(
                f"{scope['method']}, HTTP/{version}: this server speaks HTTP/1.1; it is not a proxy"
            )
        if len(length) > _MAX_LENGTH_DIGITS:
            raise MalformedRequest(f"Content-Length: more than {_MAX_LENGTH_DIGITS} digits")
        if hosts > 1 or (version == "1.1" and hosts == 0):
            raise MalformedRequest(f"{hosts} Host headers: expected one")
        if codings and (codings != [b"chunked"] or version == "1.0"):
            raise MalformedRequest(
                "Transfer-Encoding: expected chunked, at most once, and in HTTP/1.1"
            )
        self._bytes_left = int(length)
        self.chunks = ChunkedBody() if codings else None
        self.more_body = self.chunks is not None or self._bytes_left > 0
        self.is_wanted = self.chunks is None and not expected
        self._may_discard = self.is_wanted and self._bytes_left <= DISCARDED_BYTES
        self._expects_continue = expected.lower() == b"100-continue" and version == "1.1"
        self._is_head = scope["method"] == "HEAD"  # do not keep the scope: it holds the exchange
        self._connection = connection
        self._parts = [] if self.more_body else [b""]
        self.waiting = 0
        self.answered = False
        self.complete = False
        self.keep_alive = keep_alive
        self._names_keep_alive = version == "1.0"
        self.error: ServiceError | None = None
        self.news = asyncio.Event()
        self._answer_headers = b""

    def take(self, data: bytes) -> bytes:
        """Parse received bytes of the body, and return the unparsed rest.

        Raises as `ChunkedBody.take`.
        """
        chunks = self.chunks
        if chunks is None:
            part = data[: self._bytes_left]
            rest = data[self._bytes_left :]
            self._bytes_left -= len(part)
            is_complete = not self._bytes_left
        else:
            part, rest = chunks.take(data)
            is_complete = chunks.is_complete
            if chunks.is_paused:
                asyncio.get_running_loop().call_soon(self._connection.advance)
        if part and not self.answered:  # the rest of a refused body is dropped
            self._parts.append(part)
            self.waiting += len(part)
            self.news.set()
        if is_complete:
            self.more_body = False
            self.waiting = 0
            self._parts = self._parts or [b""]
            self.news.set()
        return rest

    async def run(self, app: HttpApplication, scope: Scope) -> None:
        """Run the application; close the connection if it returns without a complete answer."""
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            logger.exception("the application failed")
        finally:
            if not self.complete:
                self._connection.is_refused = True
                self._connection.transport.close()
            # Break the reference cycle: garbage of the application may still hold this object.
            del self._connection

    async def receive(self) -> Message:
        """Return the next part of the body, or `http.disconnect`; raises `error`."""
        connection = self._connection
        if not self.is_wanted:
            self.is_wanted = True
            if self._expects_continue and not (self.answered or connection.transport.is_closing()):
                connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            connection.advance()
        while not (self.error or self.complete or connection.left.done()):
            if self._parts:
                parts = self._parts
                self._parts = []
                self.waiting = 0
                body = parts[0] if len(parts) == 1 else b"".join(parts)
                more_body = self.more_body
                if more_body:
                    connection.advance()
                return {"type": "http.request", "body": body, "more_body": more_body}
            self.news.clear()
            await self.news.wait()
        if self.error is not None:
            raise copy.copy(self.error)  # a raised error holds its frames, and these the exchange
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send a part of the answer; its headers share a packet with the begin of its body."""
        connection = self._connection
        if connection.drained is not None:
            await connection.drained.wait()
        if connection.left.done():
            return
        if message["type"] == "http.response.start":
            self._answer_headers = self._encode_headers(message["status"], message["headers"])
            self.answered = True
            self._parts = []
            self.waiting = 0
            return
        headers = self._answer_headers
        self._answer_headers = b""
        # A closing transport means that the client has closed its side: it counts as disconnected.
        if not connection.transport.is_closing():
            parts = (headers, b"" if self._is_head else message["body"])
            # asyncio would try for ever to send b"".
            connection.transport.writelines([part for part in parts if part])
        if not message.get("more_body", False):
            self.complete = True
            self.news.set()
            connection.answered(self)

    def _encode_headers(self, status: int, headers: Iterable[Header]) -> bytes:
        """Return status line and headers of the answer.

        The connection closes after the answer if the rest of the request's body is too long to
        discard.
        """
        connection = self._connection
        by_name = dict(headers)
        closes = (
            connection.is_refused
            or connection.connections.ending_since is not None
            or b"close" in by_name.get(b"connection", b"")
        )
        is_worth_reading = self._may_discard and status != HTTPStatus.REQUEST_TIMEOUT
        has_end = b"content-length" in by_name or status in (
            HTTPStatus.NO_CONTENT,
            HTTPStatus.NOT_MODIFIED,
        )
        self.keep_alive = (
            self.keep_alive and has_end and not closes and (is_worth_reading or not self.more_body)
        )
        others = [header for header in headers if header[0] != b"connection"]
        if self.keep_alive and self._names_keep_alive:
            others.append((b"connection", b"keep-alive"))
        return encode_headers(
            status, connection.state.default_headers + others, closes=not self.keep_alive
        )


def encode_headers(status: int, headers: Iterable[Header], *, closes: bool) -> bytes:
    """Return status line and headers; raises `RuntimeError` if a header holds a line break."""
    lines = [_STATUS_LINES[status], *[b"%b: %b" % (name, value) for name, value in headers]]
    encoded = b"\r\n".join([*lines, *[b"connection: close"] * closes, b"", b""])
    if encoded.count(b"\n") + encoded.count(b"\r") != 2 * (len(lines) + closes + 1):
        raise RuntimeError("a header with a line break")
    return encoded
