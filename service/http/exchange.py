"""One request and its answer, between a connection and the ASGI application, and what is refused of its head."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

from service.errors import ExpectationFailed, HttpVersionNotSupported, MalformedRequest, UnsupportedTransferCoding

logger = logging.getLogger(__name__)

Header = tuple[bytes, bytes]

_EXTENSION = "vitserve.exchange"
"""Key of the exchange among a scope's extensions."""

# A name, an IPv4 or bracketed IPv6 address, and a port; it is empty where the target has no host.
_HOST = re.compile(rb"(?:[\w.~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::\d*)?", re.ASCII)

DISCARDED_BYTES = 1 << 20
"""Length of a body that is worth reading to its end after a refusal: a new connection costs both sides more."""

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NO_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_NO_BODY = frozenset({HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED})


class ArrivingBody(Protocol):
    """A body that the application is reading."""

    def crawls(self) -> bool:
        """Return whether it arrives too slowly to keep its memory while other requests need it."""

    def give_way(self) -> None:
        """End it, so that its request is answered."""


class Exchange:
    """The state of a request that the HTTP protocol and the application share.

    Attributes:
        discards_body: the protocol reads and discards what the answer leaves unread of the body.
        broken_framing: how the body broke its framing; None while it has not.
        arriving: the body while the application reads it, else None.
        caller_left: done when the caller is gone; None under a server that says so in `receive` alone.
        status: of the answer; None until it starts.
        refused_at: seconds of the application's clock at which it was refused for want of room; None if it was not.
        refused_before: the same of the connection's last request.
    """

    def __init__(self) -> None:
        self.refused_at: float | None = None
        self.refused_before: float | None = None
        self.discards_body = False
        self.broken_framing: str | None = None
        self.arriving: ArrivingBody | None = None
        self.caller_left: asyncio.Future[None] | None = None
        self.status: int | None = None


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange of a request; a new `Exchange` under another server."""
    extensions = scope.setdefault("extensions", {})
    exchange: Exchange = extensions.get(_EXTENSION) or extensions.setdefault(_EXTENSION, Exchange())
    return exchange


class Connection(Protocol):
    """What an exchange needs of its connection."""

    transport: asyncio.Transport
    writable: asyncio.Event
    """Set while the caller reads what is sent."""

    @property
    def default_headers(self) -> list[Header]:
        """Return the headers that every answer has."""

    def resume_reading(self) -> None:
        """Read from the socket again."""

    def answered(self, exchange: HttpExchange) -> None:
        """Go on after an answer that is complete."""


class HttpExchange(Exchange):
    """An exchange over a connection, as ASGI has it.

    Args:
        version: of the protocol, `1.1` or `1.0`.
        keep_alive: the connection goes on after the answer.
        expects_continue: the caller sends its body after an answer of 100.

    Attributes:
        more_body: the end of the body has not come.
        waiting_bytes: of the body, which the application has not taken yet.
        complete: the answer is written to its end.
        disconnected: the caller is gone.
    """

    def __init__(
        self, connection: Connection, method: str, version: str, *, keep_alive: bool, expects_continue: bool
    ) -> None:
        super().__init__()
        self.caller_left = asyncio.get_running_loop().create_future()
        self.version = version
        self.keep_alive = keep_alive
        self._method = method
        self.more_body = True
        self.complete = False
        self.disconnected = False
        self._connection = connection
        self._expects_continue = expects_continue
        self._body: list[bytes] = []
        self.waiting_bytes = 0
        self._changed = asyncio.Event()
        self._head: bytes = b""
        self._chunked = False
        self._length: int | None = None
        """Bytes that the answer still has to have; None where it does not say."""

    @property
    def is_refused(self) -> bool:
        """Return whether the whole answer is out, and the rest of the body is read so that the caller sees it."""
        return self.status is not None and not self.complete and self._length == 0

    def add_body(self, data: bytes) -> None:
        """Take a piece of the body."""
        self._body.append(data)
        self.waiting_bytes += len(data)
        self._changed.set()

    def end_body(self) -> None:
        """Mark the body as ended."""
        self.more_body = False
        self._changed.set()

    def disconnect(self) -> None:
        """End the application's wait for the body, as the caller is gone."""
        self.disconnected = True
        self._changed.set()
        if self.caller_left is not None and not self.caller_left.done():
            self.caller_left.set_result(None)

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Let the application answer; the connection closes if it does not do so to the end."""
        scope["extensions"] = {_EXTENSION: self}
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            logger.exception("the application failed")
        finally:
            if not (self.complete or self.disconnected):
                self._connection.transport.close()

    async def receive(self) -> Message:
        """Return the next piece of the body, or `http.disconnect` once there can be none."""
        transport = self._connection.transport
        if self._expects_continue and self.status is None and not transport.is_closing():
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        if not (self.disconnected or self.complete):
            self._connection.resume_reading()
            await self._changed.wait()
            self._changed.clear()
        if self.disconnected or self.complete:
            return {"type": "http.disconnect"}
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body, self.waiting_bytes = [], 0
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Send a part of the answer, or raise `RuntimeError` if it is out of order or has an invalid header.

        The head goes out together with the first bytes of the body.
        """
        if not (self._connection.writable.is_set() or self.disconnected):
            await self._connection.writable.wait()
        if self.disconnected:
            return
        expected = "http.response.start" if self.status is None else "http.response.body"
        if self.complete or message["type"] != expected:
            raise RuntimeError(f"{message['type']} where {'nothing' if self.complete else expected} can be sent")
        if self.status is None:
            self._start(message["status"], [*self._connection.default_headers, *message.get("headers", ())])
        else:
            self._write(message.get("body", b""), is_last=not message.get("more_body", False))

    def _start(self, status: int, headers: list[Header]) -> None:
        self.status = status
        closes = False
        for name, value in headers:
            match name.lower():
                case b"content-length":
                    self._length = int(value)
                case b"transfer-encoding":
                    self._chunked = True
                case b"connection":
                    closes = closes or b"close" in value.lower()
        if self._method == "HEAD" or status in _NO_BODY:
            self._length = 0
        elif self._length is None and not self._chunked:
            if self.version == "1.0":
                self.keep_alive = False  # the answer ends with the connection
            else:
                headers.append((b"transfer-encoding", b"chunked"))
                self._chunked = True
        self.keep_alive = self.keep_alive and not closes
        if not (self.keep_alive or closes):
            headers.append((b"connection", b"close"))
        self._head = head_bytes(status, headers)

    def _write(self, body: bytes, *, is_last: bool) -> None:
        if self._method == "HEAD":
            body = b""
        if self._length is not None:
            self._length -= len(body)
            if self._length < 0 or (is_last and self._length > 0):
                raise RuntimeError("the body is not as long as its Content-Length says")
        parts: list[bytes] = [self._head] if self._head else []
        self._head = b""
        if self._chunked:
            if body:
                parts += [b"%x\r\n" % len(body), body, b"\r\n"]
            if is_last:
                parts.append(b"0\r\n\r\n")
        elif body:
            parts.append(body)
        transport = self._connection.transport
        if len(parts) == 1:
            transport.write(parts[0])
        elif parts:
            transport.writelines(parts)
        if is_last:
            self.complete = True
            self._changed.set()
            if not self.keep_alive:
                transport.close()
            self._connection.answered(self)


def head_bytes(status: int, headers: list[Header]) -> bytes:
    """Return the head of an answer; raises `RuntimeError` if a header is invalid."""
    lines = [_status_line(status)]
    lines += [_header_line(name, value) for name, value in headers]
    lines.append(b"\r\n")
    return b"".join(lines)


@lru_cache(maxsize=128)
def _header_line(name: bytes, value: bytes) -> bytes:
    if _NAME.fullmatch(name) is None or _NO_VALUE.search(value) is not None:
        raise RuntimeError(f"{name!r}: {value!r} is no valid header")
    return b"%b: %b\r\n" % (name, value)


@lru_cache(maxsize=128)
def _status_line(status: int) -> bytes:
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


def check_head(version: str, headers: Iterable[Header]) -> None:
    """Check the protocol's version and the headers, names in lower case, that say how to read a request.

    Raises:
        HttpVersionNotSupported: it is neither HTTP/1.1 nor HTTP/1.0.
        MalformedRequest: no valid Host, or several, or an invalid framing of the body.
        UnsupportedTransferCoding: a body that is more than chunked.
        ExpectationFailed: an expectation other than 100-continue.
    """
    if version not in ("1.1", "1.0"):
        raise HttpVersionNotSupported(f"HTTP/{version}: this server speaks HTTP/1.1")
    old = version == "1.0"
    hosts, codings, expectation = [], [], b"100-continue"
    for name, value in headers:
        if name == b"host":
            hosts.append(value.strip())
        elif name == b"transfer-encoding":
            codings += [coding.strip().lower() for coding in value.split(b",")]
        elif name == b"expect" and not old:
            expectation = value.strip().lower()
    if len(hosts) > 1 or (not hosts and not old):
        raise MalformedRequest(f"{len(hosts)} Host headers: expected one")
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        raise MalformedRequest("the Host header names no host")
    if codings and old:
        raise MalformedRequest("Transfer-Encoding needs HTTP/1.1")
    if codings and (codings.count(b"chunked") > 1 or codings[-1] != b"chunked"):
        raise MalformedRequest("Transfer-Encoding: chunked comes last, and once")
    if len(codings) > 1:
        raise UnsupportedTransferCoding("Transfer-Encoding: only chunked is understood")
    if expectation != b"100-continue":
        raise ExpectationFailed("Expect: only 100-continue can be met")


def may_discard(version: str, headers: Iterable[Header]) -> bool:
    """Return whether the connection can go on after a refusal, with the rest of the body read and discarded.

    Its end must be known and near, and it must be certain to come: after `Expect: 100-continue` it may not.
    """
    length = b"0"
    for name, value in headers:
        if name == b"content-length":
            length = value
        elif name in (b"transfer-encoding", b"expect") or (name == b"connection" and value.lower() != b"keep-alive"):
            return False
    return version == "1.1" and int(length) <= DISCARDED_BYTES
