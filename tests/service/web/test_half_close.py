"""A caller that says that it sends no more, and still reads; and one that is gone, which looks the same at first."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import pytest

from tests.service.fakes import on_a_loop, png
from tests.service.web.apps import pipeline_of, until
from tests.service.web.listening import GET, Connection, listening, post
from tests.service.web.wire import Wire

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


async def final_answer(connection: Connection) -> tuple[int, bytes]:
    """The next answer that is not an interim one."""
    while (answer := await connection.answer()).status == 100:
        pass
    return answer.status, answer.body


@on_a_loop
@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_a_caller_that_sends_no_more_is_answered(version: bytes) -> None:
    async with listening() as server, server.connect() as connection:
        server.app.engine.gate.clear()
        await connection.send(post(png(6)).replace(b"HTTP/1.1", version))
        connection.writer.write_eof()
        await until(lambda: server.app.engine.waiting == 1)
        server.app.engine.gate.set()
        status, body = await final_answer(connection)
        assert (status, json.loads(body)["predictions"][0]["index"]) == (200, 6)
        assert await connection.is_closed()


@on_a_loop
async def test_every_request_that_came_whole_before_the_end_is_answered() -> None:
    async with listening() as server, server.connect() as connection:
        await connection.send(post(png(1)) + GET + post(png(2)) + post(png(3))[:-1])
        connection.writer.write_eof()
        statuses = []
        for _ in range(3):
            statuses.append((await final_answer(connection))[0])
        assert statuses == [200] * 3
        assert await connection.is_closed()
        await until(lambda: not server.state.tasks)
        assert pipeline_of(server.app).limiter.in_use == 0


@on_a_loop
@pytest.mark.parametrize(
    "sent", [b"", GET[:-2], GET + GET[:9], post(png(1))[:-1]], ids=["nothing", "head", "2nd", "body"]
)
async def test_a_request_that_is_cut_off_is_none(sent: bytes) -> None:
    async with listening() as server, server.connect() as connection:
        await connection.send(sent)
        connection.writer.write_eof()
        if sent.startswith(GET):
            assert (await connection.answer()).status == 200
        assert await connection.is_closed()
        await until(lambda: not server.state.tasks)
        assert pipeline_of(server.app).limiter.in_use == 0


@on_a_loop
@pytest.mark.parametrize("reset", [False, True])
async def test_a_caller_that_is_gone_is_noticed_while_its_request_waits(reset: bool) -> None:
    async with listening() as server:
        server.app.engine.gate.clear()
        async with server.connect() as connection:
            await connection.send(post(png(1)))
            await until(lambda: server.app.engine.waiting == 1)
            if reset:
                peer: socket.socket = connection.writer.get_extra_info("socket")
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await until(lambda: server.app.engine.cancelled == 1)
        await until(lambda: not server.state.connections)
        assert server.app.metric("vit_requests_total", endpoint="/classify", code="499") == 1


@on_a_loop
async def test_no_interim_answer_goes_to_an_old_client() -> None:
    for version, interim in ((b"HTTP/1.1", CONTINUE), (b"HTTP/1.0", b"")):
        async with Wire() as wire:
            wire.gate.clear()
            await wire.send(GET.replace(b"HTTP/1.1", version))
            assert wire.protocol.eof_received()
            assert wire.transport.written == interim
            wire.gate.set()
            await wire.settle()
            assert wire.answers.statuses[-1] == 200
            assert wire.closing


@on_a_loop
async def test_the_watch_for_a_caller_that_is_gone_ends_with_its_answer() -> None:
    async with Wire() as wire:
        wire.gate.clear()
        await wire.send(GET)
        wire.protocol.eof_received()
        for _ in range(10):
            wire.clock.advance(1.0)
            assert not wire.closing
        wire.transport.error = 32
        wire.clock.advance(1.0)
        assert wire.closing
        assert not [timer for timer in wire.clock.timers if not timer.cancelled]
        await asyncio.sleep(0)


@on_a_loop
async def test_a_caller_that_leaves_is_looked_for_soon_and_then_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    async with Wire() as wire:

        def no_error(*_: int) -> int:
            looks.append(wire.clock.now)
            return 0

        monkeypatch.setattr(wire.transport, "getsockopt", no_error)
        wire.gate.clear()
        await wire.send(GET)
        wire.protocol.eof_received()
        for _ in range(400):
            wire.clock.advance(0.01)
        wire.gate.set()
        await wire.settle()
    assert looks == pytest.approx([0.05, 0.15, 0.35, 0.75, 1.55, 2.55, 3.55], abs=0.1)


@on_a_loop
async def test_a_caller_whose_body_broke_its_framing_is_answered_though_it_sends_no_more() -> None:
    async with Wire() as wire:
        wire.gate.clear()
        await wire.send(post(b"no length\r\n", "Transfer-Encoding: chunked", length=False))
        assert wire.protocol.eof_received()
        wire.gate.set()
        await wire.settle()
        assert b"HTTP/1.1 400 " in wire.transport.written
        assert wire.closing


@on_a_loop
@pytest.mark.parametrize(
    ("sent", "whole"),
    [(GET + GET, 2), (GET + GET + post(b"ab")[:-1], 2), (GET + post(b"ab")[:-1], 1), (post(b"ab")[:-1], 0), (b"", 0)],
    ids=["all", "all but the third", "the first", "none", "nothing"],
)
async def test_the_connection_stays_open_just_for_those_that_came_whole(sent: bytes, whole: int) -> None:
    async with Wire() as wire:
        wire.gate.clear()
        await wire.send(sent)
        assert wire.protocol.eof_received() is (whole > 0)
        wire.gate.set()
        await wire.settle()
        assert wire.transport.written.count(b"HTTP/1.1 200 OK") == whole
        assert wire.transport.closed is (whole > 0)
