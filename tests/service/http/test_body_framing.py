"""Bytes of a body are bounded by whoever reads it, and what frames them by the HTTP protocol."""

from __future__ import annotations

import pytest

from tests.service.fakes import on_a_loop
from tests.service.http.wire import Request, Wire

MOST = 64 << 10


@on_a_loop
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_is_not_bounded_by_what_may_frame_it(chunked: bool) -> None:
    pieces = [bytes(50_000)] * 4
    framing = "Transfer-Encoding: chunked" if chunked else "Content-Length: 200000"
    async with Wire() as wire:
        await wire.send(f"POST /b HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode())
        for piece in pieces:
            await wire.send(b"c350\r\n%b\r\n" % piece if chunked else piece)
        if chunked:
            await wire.send(b"0\r\n\r\n")
        assert wire.requests == [Request("POST", "/b", b"".join(pieces))]
        assert wire.answers.statuses == [200]


@on_a_loop
async def test_what_frames_a_body_is_counted_from_the_last_byte_of_it() -> None:
    async with Wire() as wire:
        await wire.send(b"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc")
        await wire.send(b"\r\n1;" + b"x" * (MOST - 4))
        assert not wire.transport.written
        await wire.send(b"x")
        assert wire.answers.statuses == [400]
