"""Requests for another protocol: each is answered in HTTP/1.1, however it is cut, and none keeps the server busy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from tests.service.fakes import on_a_loop
from tests.service.http.wire import Request, Wire

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
CHUNKED = b"3\r\nabc\r\n0\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
FRAME = b"\x81\x85\x01\x02\x03\x04IGOHN"

SEEN_GET, SEEN_BODY = Request("GET", "/a", b""), Request("POST", "/b", b"abc")


def head(first: str, *headers: str) -> bytes:
    return "\r\n".join([first, "Host: x", *headers, "", ""]).encode()


def offer(protocol: str, *headers: str, method: str = "GET", path: str = "/a", connection: str = "Upgrade") -> bytes:
    return head(f"{method} {path} HTTP/1.1", f"Connection: {connection}", f"Upgrade: {protocol}", *headers)


def halves(data: bytes) -> Iterator[tuple[bytes, ...]]:
    """At once, cut in two anywhere, and byte by byte."""
    yield (data,)
    yield from ((data[:cut], data[cut:]) for cut in range(1, len(data)))
    yield tuple(data[i : i + 1] for i in range(len(data)))


@asynccontextmanager
async def after(*chunks: bytes) -> AsyncIterator[Wire]:
    async with Wire() as wire:
        for chunk in chunks:
            await wire.send(chunk)
        yield wire


CONNECT = {
    "origin form": head("CONNECT / HTTP/1.1"),
    "path of a route": head("CONNECT /classify HTTP/1.1"),
    "authority form": head("CONNECT example.org:443 HTTP/1.1", "Host: example.org:443"),
    "IPv6": head("CONNECT [::1]:443 HTTP/1.1"),
    "asterisk": head("CONNECT * HTTP/1.1"),
    "absolute form": head("CONNECT http://example.org/ HTTP/1.1"),
    "HTTP/1.0": head("CONNECT x:443 HTTP/1.0"),
    "HTTP/2.0": head("CONNECT x:443 HTTP/2.0"),
    "no version": head("CONNECT /"),
    "no target": head("CONNECT  HTTP/1.1"),
    "length": head("CONNECT x:443 HTTP/1.1", "Content-Length: 3") + b"abc",
    "no length": head("CONNECT x:443 HTTP/1.1", "Content-Length: 0"),
    "chunked": head("CONNECT x:443 HTTP/1.1", "Transfer-Encoding: chunked") + CHUNKED,
    "h2c": offer("h2c", method="CONNECT", path="x:443"),
    "websocket": offer("websocket", method="CONNECT", path="/"),
    "close": head("CONNECT x:443 HTTP/1.1", "Connection: close"),
    "keep-alive": head("CONNECT x:443 HTTP/1.0", "Connection: keep-alive"),
    "expect": head("CONNECT x:443 HTTP/1.1", "Expect: 100-continue"),
    "a request behind it": head("CONNECT / HTTP/1.1") + GET,
    "TLS behind it": head("CONNECT x:443 HTTP/1.1") + b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "itself behind it": head("CONNECT / HTTP/1.1") * 3,
    "HTTP/2 behind it": head("CONNECT x:80 HTTP/1.1") + PREFACE + SETTINGS,
}


@on_a_loop
@pytest.mark.parametrize("sent", CONNECT.values(), ids=CONNECT)
async def test_a_tunnel_is_refused_with_405_and_the_connection_closes(sent: bytes) -> None:
    for chunks in halves(sent):
        async with after(*chunks) as wire:
            answers = wire.answers
            assert (answers.statuses, answers.code) == ([405], "method_not_allowed")
            assert (answers.headers[0]["connection"], answers.headers[0]["allow"]) == ("close", "")
            assert wire.closing
            assert wire.requests == []


@on_a_loop
async def test_a_refused_tunnel_is_answered_under_the_callers_request_id() -> None:
    async with after(head("CONNECT x:443 HTTP/1.1", "X-Request-ID: mine-1")) as wire:
        assert wire.answers.headers[0]["x-request-id"] == "mine-1"


@on_a_loop
async def test_a_tunnel_asked_for_behind_an_answered_request_is_refused() -> None:
    async with after(GET, head("CONNECT / HTTP/1.1")) as wire:
        assert wire.answers.statuses == [200, 405]
        assert wire.closing


@on_a_loop
@pytest.mark.parametrize("waiting", [1, 2])
async def test_a_tunnel_asked_for_behind_waiting_requests_does_not_take_their_answers(waiting: int) -> None:
    async with after(GET * waiting + head("CONNECT / HTTP/1.1") + GET) as wire:
        answers = wire.answers
        assert answers.statuses == [200] * waiting
        assert answers.headers[-1]["connection"] == "close"
        assert wire.requests == [SEEN_GET] * waiting
        assert wire.closing


ANSWERED: dict[str, tuple[bytes, list[Request], bool]] = {
    # name: what is sent, what the application receives, whether the connection then closes
    "h2c": (offer("h2c"), [SEEN_GET], False),
    "websocket": (offer("websocket"), [SEEN_GET], False),
    "any protocol": (offer("x/9"), [SEEN_GET], False),
    "two offers": (offer("h2c", "Upgrade: websocket"), [SEEN_GET], False),
    "empty header": (offer("h2c", "A:", "B: "), [SEEN_GET], False),
    "no connection header": (head("GET /a HTTP/1.1", "Upgrade: h2c"), [SEEN_GET], False),
    "empty offer": (offer(""), [SEEN_GET], False),
    "close": (offer("h2c", connection="Upgrade, close"), [SEEN_GET], True),
    "close alone": (offer("h2c", connection="close"), [SEEN_GET], True),
    "close elsewhere": (offer("h2c", "Connection: close"), [SEEN_GET], True),
    "close, a request behind it": (offer("h2c", connection="Upgrade, close") + GET, [SEEN_GET], True),
    "HTTP/1.0": (head("GET /a HTTP/1.0", "Connection: upgrade", "Upgrade: h2c"), [SEEN_GET], True),
    "HTTP/2.0": (head("GET /a HTTP/2.0", "Connection: upgrade", "Upgrade: h2c"), [], True),
    "a request behind it": (offer("h2c") + GET, [SEEN_GET] * 2, False),
    "many": (offer("h2c") * 5 + BODY, [SEEN_GET] * 5 + [SEEN_BODY], False),
    "a tunnel behind it": (offer("h2c") + head("CONNECT / HTTP/1.1"), [SEEN_GET], True),
    "HTTP/2 behind it": (offer("h2c") + PREFACE + SETTINGS, [SEEN_GET], True),
    "a frame behind it": (offer("websocket") + FRAME, [SEEN_GET], True),
    "length": (
        offer("h2c", "Content-Length: 3", method="POST", path="/b") + b"abc" + GET,
        [SEEN_BODY, SEEN_GET],
        False,
    ),
    "chunked": (
        offer("h2c", "Transfer-Encoding: chunked", method="POST", path="/b") + CHUNKED + GET,
        [SEEN_BODY, SEEN_GET],
        False,
    ),
    "chunked, close": (
        offer("h2c", "Transfer-Encoding: chunked", method="POST", path="/b", connection="upgrade, close") + CHUNKED,
        [SEEN_BODY],
        True,
    ),
    "broken chunk": (offer("h2c", "Transfer-Encoding: chunked", method="POST") + b"zz\r\n", [], True),
    "both lengths": (offer("h2c", "Content-Length: 3", "Transfer-Encoding: chunked", method="POST"), [], True),
    "bad target": (offer("h2c", path="a"), [], True),
    "HTTP/2": (PREFACE + SETTINGS, [], True),
    "PRI in HTTP/1.1": (b"PRI / HTTP/1.1\r\nHost: x\r\n\r\n" + GET, [], True),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", [], True),
}


@on_a_loop
@pytest.mark.parametrize(("sent", "seen", "closes"), ANSWERED.values(), ids=ANSWERED)
async def test_an_offer_is_answered_in_this_protocol(sent: bytes, seen: list[Request], closes: bool) -> None:
    for chunks in halves(sent):
        async with after(*chunks) as wire:
            assert wire.requests == seen
            statuses = wire.answers.statuses
            assert statuses[: len(seen)] == [200] * len(seen)
            # Whether a refusal follows depends on whether the last request was answered when it came to the refusal.
            assert statuses[len(seen) :] in ([], [400], [405], [505])
            assert statuses
            assert wire.closing == closes


@on_a_loop
async def test_100_continue_is_sent_for_a_body_that_comes_with_an_offer() -> None:
    request = offer("h2c", "Content-Length: 3", "Expect: 100-continue", method="POST", path="/b")
    async with after(request) as wire:
        assert wire.transport.written == b"HTTP/1.1 100 Continue\r\n\r\n"
        await wire.send(b"abc")
        assert wire.requests == [SEEN_BODY]
