"""Whatever bytes come, cut wherever: the parser is fed a bounded number of times, and everything comes to its end."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.service.fakes import on_a_loop
from tests.service.http.wire import Request, Wire

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
CONNECT = b"CONNECT / HTTP/1.1\r\n\r\n"
OFFER = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"

FEW = settings(max_examples=200)


async def converse(chunks: list[bytes]) -> list[Request]:
    """Send the chunks, check what comes back, leave; returns the requests that the application received."""
    async with Wire() as wire:
        for chunk in chunks:
            await wire.send(chunk)
        statuses = wire.answers.statuses
        refusals = {400, 405, 417, 501, 505}
        assert set(statuses) <= {100, 200, *refusals}
        assert not refusals & set(statuses[:-1]), "it goes on after a refusal"
        assert wire.closing or not refusals & set(statuses)
        assert statuses.count(200) == len(wire.requests)
        return wire.requests


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The data in pieces that end at these places."""
    edges = [0, *sorted({place % (len(data) + 1) for place in places} - {0, len(data)}), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


CUTS = st.lists(st.integers(0, 1 << 16), max_size=8)

METHODS = st.sampled_from(["GET", "HEAD", "POST", "CONNECT", "CONNECT", "PRI", "SOURCE", "M-SEARCH", "get"])
TARGETS = st.sampled_from(
    ["/", "/a?b=c", "/%zz", "http://x/a", "*", "x:443", "[::1]:443", "http://x", "/\x80", "", "a"]
)
VERSIONS = st.sampled_from(["HTTP/1.1"] * 5 + ["HTTP/1.0", "HTTP/2.0", "HTTP/3.0", "RTSP/1.0", "ICE/1.0", ""])
CONNECTION = st.sampled_from(
    [
        ["Host: x"],
        ["A:"],
        ["Expect: 100-continue"],
        ["Expect: foo"],
        ["Connection: close"],
        ["Connection: keep-alive"],
        ["Upgrade: h2c"],
        ["upgrade:", "Connection: upgrade"],
        ["Upgrade: websocket", "Connection: Upgrade"],
        ["Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk"],
        ["Connection: upgrade, close", "Upgrade: h2c"],
        ["Proxy-Connection: upgrade", "Upgrade: h2c"],
    ]
)
TRAILERS = b"0\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n"
FRAMED = st.sampled_from(
    [
        ([], b""),
        ([], b"\r\n"),
        (["Content-Length: 0"], b""),
        (["Content-Length: 5"], b"abcde"),
        (["Transfer-Encoding: chunked"], b"5\r\nabcde\r\n0\r\n\r\n"),
        (["Transfer-Encoding: chunked"], b"5;x=y\r\nabcde\r\n" + TRAILERS),
    ]
)
BROKEN = st.sampled_from(
    [
        ([": x"], b""),
        (["A"], b""),
        (["A: b", " folded"], b""),
        (["Content-Length: -1"], b""),
        (["Content-Length: 5"], b"abc"),
        (["Content-Length: 5", "Transfer-Encoding: chunked"], b"abcde"),
        (["Transfer-Encoding: chunked, identity"], b"abcde"),
        (["Transfer-Encoding: gzip, chunked"], b"5\r\nabcde\r\n0\r\n\r\n"),
        (["Transfer-Encoding: chunked"], b"5\r\nabcdefg\r\n"),
        ([], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"),
        ([], b"\x81\x85\x01\x02\x03\x04IGOHN"),
        ([], b"\x16\x03\x01\x02\x00"),
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    first = " ".join([draw(METHODS), draw(TARGETS), draw(VERSIONS)]).rstrip(" ")
    headers, body = draw(st.one_of(FRAMED, FRAMED, BROKEN))
    offers = [line for lines in draw(st.lists(CONNECTION, max_size=2)) for line in lines]
    host = draw(st.sampled_from([["Host: x"]] * 9 + [[]]))
    return "\r\n".join([first, *host, *offers, *headers, "", ""]).encode("latin-1") + body


STREAMS = st.lists(st.one_of(requests(), requests(), st.just(GET), st.binary(max_size=8)), min_size=1, max_size=6)


@FEW
@given(st.binary(max_size=300), CUTS)
@example(CONNECT, [])
@example(CONNECT, [21])
@example(OFFER * 5 + CONNECT * 5, [])
def test_any_bytes_are_parsed_in_a_bounded_number_of_steps(data: bytes, places: list[int]) -> None:
    asyncio.run(converse(cut(data, places)))


@FEW
@given(STREAMS, CUTS)
@example([CONNECT], [])
@example([CONNECT, OFFER, CONNECT], [])
@example([OFFER], list(range(len(OFFER))))
def test_requests_are_parsed_in_a_bounded_number_of_steps_and_alike_however_they_are_cut(
    stream: list[bytes], places: list[int]
) -> None:
    data = b"".join(stream)
    whole = asyncio.run(converse([data]))
    pieces = asyncio.run(converse(cut(data, places)))
    assert pieces == whole


BIG = b"X-Big: " + b"a" * 70_000 + b"\r\n"


@on_a_loop
@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n" + BIG + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + BIG + b"\r\n" + GET,
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n" + GET,
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n" + BIG + b"\r\nhello" + GET,
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n" + BIG + b"\r\n" + GET,
    ],
    ids=["header", "a request behind it", "target", "body", "offer"],
)
@pytest.mark.parametrize("step", [1 << 20, 40_000])
async def test_a_head_that_is_too_large_is_refused_however_it_arrives(sent: bytes, step: int) -> None:
    assert await converse([sent[at : at + step] for at in range(0, len(sent), step)]) == []


@on_a_loop
async def test_a_head_that_is_too_large_takes_no_answer_from_the_request_before_it() -> None:
    async with Wire() as wire:
        await wire.send(GET + b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n" + BIG + b"\r\nhello" + GET)
        assert wire.answers.statuses == [200]
        assert len(wire.requests) == 1
        assert wire.closing
