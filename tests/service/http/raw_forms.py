"""What rows of raw HTTP requests are made of (RFC 9110, RFC 9112).

Tests check every row; `make fuzz` takes what is sent as the start of its mutations.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.service.fakes import png

RED = 7
"""What the picture is classified as."""
PNG = png(RED)


class Form(NamedTuple):
    """One row: what is sent on a fresh connection, the status of each answer, and whether the connection is kept."""

    sent: bytes
    statuses: tuple[int, ...]
    kept: bool


def kept(sent: bytes, *statuses: int) -> Form:
    """What is answered, and the connection goes on."""
    return Form(sent, statuses, kept=True)


def closes(sent: bytes, *statuses: int) -> Form:
    """What is answered with the connection's last answers."""
    return Form(sent, statuses, kept=False)


def refused(sent: bytes) -> Form:
    """What is no request."""
    return closes(sent, 400)


def get(*headers: bytes, line: bytes = b"GET /healthz HTTP/1.1", end: bytes = b"\r\n") -> bytes:
    """A request without a body."""
    return end.join([line, b"Host: x", *headers, b"", b""])


def post(body: bytes, *headers: bytes, path: bytes = b"/classify") -> bytes:
    """A request with a body, whose length only `headers` tell."""
    return get(b"Content-Type: image/png", *headers, line=b"POST %b HTTP/1.1" % path) + body


def sized(value: bytes, body: bytes = PNG) -> bytes:
    """A body with this value of Content-Length."""
    return post(body, b"Content-Length: " + value)


def chunked(body: bytes, coding: bytes = b"chunked") -> bytes:
    """A body in chunks, or what stands in their place."""
    return post(body, b"Transfer-Encoding: " + coding)


def chunk(data: bytes = PNG, size: bytes | None = None) -> bytes:
    """One chunk."""
    return (b"%x" % len(data) if size is None else size) + b"\r\n" + data + b"\r\n"


LENGTH = b"%d" % len(PNG)
FITS = b"Content-Length: " + LENGTH
LAST = b"0\r\n\r\n"
GET, POST = get(), sized(LENGTH)
