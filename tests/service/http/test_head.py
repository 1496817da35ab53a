"""Heads that the parser accepts and RFC 9112 or RFC 9110 does not, on a real socket."""

from __future__ import annotations

import pytest

from service.http.exchange import may_discard
from tests.service.fakes import on_a_loop, png
from tests.service.http.listening import GET, listening, post
from tests.service.http.wire import Wire

WRONG_HOSTS = [
    (1, b""),
    (1, b"Host: x\r\nHost: x\r\n"),
    (0, b"Host: x\r\nHost: y\r\n"),
    (1, b"Host: x/y\r\n"),
    (1, b"Host: a b\r\n"),
    (1, b"Host: me@x\r\n"),
    (1, b"Host: x:y\r\n"),
    (1, b"Host: [::1\r\n"),
]


@on_a_loop
@pytest.mark.parametrize(
    "head",
    [
        *(b"GET /healthz HTTP/1.%d\r\n%b\r\n" % (minor, hosts) for minor, hosts in WRONG_HOSTS),
        b"GET /healthz HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        post(b"0\r\n\r\n", "Transfer-Encoding: chunked, chunked", length=False),
        post(b"0\r\n\r\n", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked", length=False),
    ],
    ids=lambda head: head[16:60].decode().encode("unicode_escape").decode(),
)
async def test_a_head_that_no_sender_may_send_is_400_and_closes(head: bytes) -> None:
    async with listening() as server, server.connect() as connection:
        await connection.send(head)
        answer = await connection.answer()
        assert (answer.status, answer.code) == (400, "malformed_request")
        assert await connection.is_closed()


@on_a_loop
@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"GET /healthz HTTP/2.0\r\nHost: x\r\n\r\n", 505, "http_version_not_supported"),
        (b"GET /healthz\r\n\r\n", 505, "http_version_not_supported"),
        (post(b"x", "Expect: foo"), 417, "expectation_failed"),
        (post(b"x", "Expect: 100-continue, foo"), 417, "expectation_failed"),
        (post(b"0\r\n\r\n", "Transfer-Encoding: gzip, chunked", length=False), 501, "not_implemented"),
        (
            post(b"0\r\n\r\n", "Transfer-Encoding: gzip", "Transfer-Encoding: chunked", length=False),
            501,
            "not_implemented",
        ),
    ],
    ids=["HTTP/2.0", "HTTP/0.9", "expectation", "two expectations", "gzip", "gzip in a line of its own"],
)
async def test_what_this_server_does_not_speak_has_a_status_of_its_own(head: bytes, status: int, code: str) -> None:
    async with listening() as server, server.connect() as connection:
        await connection.send(head)
        answer = await connection.answer()
        assert (answer.status, answer.code) == (status, code)
        assert await connection.is_closed()
        assert (await server.ask(GET)).status == 200


@on_a_loop
@pytest.mark.parametrize(
    "host", ["", "x", "x.example:8000", "127.0.0.1", "[::1]:8000", "x:", "a_b", "%C3%BC", "x\t"], ids=repr
)
async def test_every_host_that_rfc_3986_allows_is_answered(host: str) -> None:
    async with listening() as server:
        assert (await server.ask(f"GET /healthz HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())).status == 200


def test_a_refusal_keeps_the_connection_of_a_megabyte_and_not_of_more() -> None:
    assert may_discard("1.1", [(b"content-length", b"1048576"), (b"connection", b"Keep-Alive")])
    assert not may_discard("1.1", [(b"content-length", b"1048577")])
    assert may_discard("1.1", [])


@on_a_loop
async def test_an_old_client_is_not_told_to_continue() -> None:
    async with listening() as server, server.connect() as connection:
        await connection.send(post(png(4), "Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await connection.answer()).status == 200


@on_a_loop
@pytest.mark.parametrize(("size", "status"), [(64 << 10, 200), ((64 << 10) + 1, 400)])
async def test_a_head_that_comes_at_once_with_what_follows_it_is_bounded_too(size: int, status: int) -> None:
    """Counted are the path, and each header with its colon, blank and end of line; not the rest of the first line."""
    headers = b"".join(b"X-%03d: \r\n" % number for number in range(200)) + b"X: "
    path = b"/healthz"
    counted = len(path) + len(headers) + len(b"Host: x\r\n" + b"\r\n")
    async with Wire() as wire:
        lines = [b"GET " + path + b" HTTP/1.1", b"Host: x", headers + b"a" * (size - counted), b"", b""]
        await wire.send(b"\r\n".join(lines) + GET)
        assert wire.answers.statuses == [status] * (2 if status == 200 else 1)


@on_a_loop
@pytest.mark.parametrize(("count", "status"), [(256, 200), (257, 400)])
async def test_a_head_may_have_256_headers(count: int, status: int) -> None:
    async with Wire() as wire:
        await wire.send(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * (count - 1) + b"\r\n")
        assert wire.answers.statuses == [status]
