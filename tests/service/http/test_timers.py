"""How long the HTTP protocol waits for callers, by a clock that the tests move."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.service.fakes import on_a_loop
from tests.service.http.wire import Wire

HEAD_SECONDS, LINGER_SECONDS, STALL_SECONDS = 30.0, 2.0, 30.0
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def answering_one() -> AsyncIterator[Wire]:
    """A connection with a request that is being answered: nothing else is waited for."""
    async with Wire() as wire:
        wire.gate.clear()
        await wire.send(GET)
        yield wire


@on_a_loop
@pytest.mark.parametrize(
    ("sent", "after_a_request"),
    [
        (b"", False),  # behind a request, an idle connection is kept for longer
        *((sent, after) for sent in (b"GET /healthz HT", b"\r\n", GET[:-2]) for after in (False, True)),
    ],
)
async def test_a_head_that_does_not_come_to_its_end_closes_the_connection(sent: bytes, after_a_request: bool) -> None:
    async with Wire() as wire:
        if after_a_request:
            await wire.send(GET)
            assert wire.answers.statuses == [200]
        if sent:
            await wire.send(sent)
        wire.clock.advance(HEAD_SECONDS - 0.1)
        assert not wire.closing
        wire.clock.advance(0.1)
        assert wire.closing


@on_a_loop
async def test_bytes_that_drip_in_do_not_give_a_head_more_time() -> None:
    async with Wire() as wire:
        for byte in GET[:20]:
            await wire.send(bytes([byte]))
            wire.clock.advance(HEAD_SECONDS / 20)
        assert wire.closing


@on_a_loop
async def test_the_clock_of_the_head_does_not_run_while_a_request_is_answered() -> None:
    async with answering_one() as wire:
        await wire.send(GET[:5])
        wire.clock.advance(100 * HEAD_SECONDS)
        assert not wire.closing
        wire.gate.set()
        await wire.settle()
        assert wire.answers.statuses == [200]
        await wire.send(GET[5:])
        assert wire.answers.statuses == [200, 200]


@on_a_loop
async def test_a_caller_that_reads_slowly_is_let_go_only_when_it_stops_reading() -> None:
    async with answering_one() as wire:
        wire.transport.unread = 1_000_000
        wire.protocol.pause_writing()
        for unread in (999_999, 500_000, 100_000):
            wire.transport.unread = unread
            wire.clock.advance(STALL_SECONDS)
            assert not wire.closing
        wire.clock.advance(STALL_SECONDS)
        assert wire.closing


@on_a_loop
async def test_a_caller_that_reads_to_the_end_is_not_let_go() -> None:
    async with answering_one() as wire:
        wire.transport.unread = 1_000_000
        wire.protocol.pause_writing()
        wire.protocol.resume_writing()
        wire.clock.advance(STALL_SECONDS)
        assert not wire.closing


@on_a_loop
@pytest.mark.parametrize("refused", [b"\x00\r\n", b"CONNECT x:443 HTTP/1.1\r\n\r\n"])
async def test_a_refused_caller_has_time_to_read_its_answer(refused: bytes) -> None:
    async with Wire() as wire:
        await wire.send(refused)
        assert wire.transport.ended
        wire.clock.advance(LINGER_SECONDS - 0.1)
        assert not wire.transport.closed
        await wire.send(GET)  # what still comes is dropped
        wire.clock.advance(0.1)
        assert wire.transport.closed
        assert len(wire.answers.statuses) == 1
        assert wire.requests == []


@on_a_loop
async def test_no_clock_runs_for_a_caller_that_is_gone() -> None:
    heard: list[str] = []
    async with Wire(on_connection=lambda: heard.append("connection")) as idle:
        assert len(idle.clock.timers) == 1
    async with answering_one() as stalled:
        stalled.protocol.pause_writing()
        assert [timer.cancelled for timer in stalled.clock.timers] == [True, False]
    for wire in (idle, stalled):
        assert all(timer.cancelled for timer in wire.clock.timers)
    assert heard == ["connection"]
