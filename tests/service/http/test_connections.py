"""How many connections there may be, and which ones are closed for others."""

from __future__ import annotations

import asyncio
import resource
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from service.http.connections import Rank, connection_limit, make_room, rank_of
from tests.service.fakes import on_a_loop, png
from tests.service.http.listening import GET, Answer, Listening, listening, post
from tests.service.http.wire import Clock
from tests.service.web.apps import service_in, until

CRAWLER, IDLE, NEWCOMER = range(3)
HALF_A_HEAD = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: "


@dataclass
class Connection:
    rank: Rank | None
    closed: bool = False

    def close(self) -> None:
        self.closed = True


def closed_of(*ranks: Rank | None) -> list[int]:
    """The indices of the connections that make room."""
    connections = [Connection(rank) for rank in ranks]
    assert make_room(connections) == any(connection.closed for connection in connections)
    return [index for index, connection in enumerate(connections) if connection.closed]


def test_the_one_that_waited_longest_makes_room_and_those_that_never_asked_come_first() -> None:
    assert closed_of((IDLE, 1), (CRAWLER, 9), (CRAWLER, 5), None) == [2]
    assert closed_of((IDLE, 4), (IDLE, 3), (NEWCOMER, 1), None) == [1]
    assert closed_of(None, None) == []
    assert closed_of() == []


def test_of_many_an_eighth_makes_room_and_never_more_than_32() -> None:
    assert closed_of(*((CRAWLER, turn) for turn in range(80))) == list(range(10))
    assert closed_of(*((CRAWLER, turn) for turn in range(1000))) == list(range(32))


def test_newcomers_make_room_one_at_a_time_and_only_if_there_is_nobody_else() -> None:
    assert closed_of(*((NEWCOMER, turn) for turn in range(80))) == [0]
    assert closed_of(*((NEWCOMER, turn) for turn in range(80)), (IDLE, 99)) == [80]


@pytest.mark.parametrize(
    ("version", "age", "rank"),
    [(None, 0.0, (NEWCOMER, 7)), (None, 0.99, (NEWCOMER, 7)), (None, 1.0, (CRAWLER, 7)), ("1.1", 0.5, (IDLE, 7))],
)
def test_one_that_just_came_is_given_a_second_to_ask(version: str | None, age: float, rank: Rank) -> None:
    exchange: Any = version and SimpleNamespace(complete=True, more_body=False)
    assert rank_of(exchange, 7, age) == rank


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "raised_to"),
    [
        (100_000, 100_000, 1000, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1000, None),
        (1024, 4096, 1000, 1128),
        (256, resource.RLIM_INFINITY, 1000, 1128),
        (1024, 1024, 896, 1024),
        (20, 20, 1, 20),
    ],
)
def test_as_many_connections_as_files_may_be_open(
    soft: int, hard: int, limit: int, raised_to: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert connection_limit(1000) == limit
    assert raised == ([] if raised_to is None else [(raised_to, hard)])


@on_a_loop
async def test_callers_that_crawl_with_their_heads_make_room_oldest_first() -> None:
    async with listening(max_connections=2) as server, AsyncExitStack() as stack:
        first = await stack.enter_async_context(server.connect())
        await first.send(HALF_A_HEAD)
        await until(lambda: len(server.state.connections) == 1)
        second = await stack.enter_async_context(server.connect())
        await second.send(HALF_A_HEAD)
        await until(lambda: len(server.state.connections) == 2)
        assert (await server.ask(GET)).status == 200
        assert await first.is_closed()
        await second.send(b"x\r\n\r\n")
        assert (await second.answer()).status == 200


@on_a_loop
async def test_a_caller_between_two_requests_stays_as_long_as_others_never_asked() -> None:
    clock = Clock()
    async with listening(clock, max_connections=2) as server, AsyncExitStack() as stack:
        regular = await stack.enter_async_context(server.connect())
        await regular.send(GET)
        assert (await regular.answer()).status == 200
        crawler = await stack.enter_async_context(server.connect())
        await crawler.send(HALF_A_HEAD)
        await until(lambda: len(server.state.connections) == 2)
        clock.advance(1)
        assert (await server.ask(GET)).status == 200
        assert await crawler.is_closed()
        await regular.send(GET)
        assert (await regular.answer()).status == 200


@on_a_loop
@pytest.mark.parametrize(
    "request_bytes",
    [
        post(bytes(100), path="/nowhere")[:-50],
        post(b"9\r\nabc", "Transfer-Encoding: chunked", path="/nowhere", length=False),
    ],
    ids=["whose rest is thrown away", "of unknown length"],
)
async def test_a_caller_that_was_refused_and_does_not_leave_makes_room(request_bytes: bytes) -> None:
    async with listening(max_connections=1) as server, server.connect() as refused:
        await refused.send(request_bytes)
        assert (await refused.answer()).status == 404
        assert (await server.ask(GET)).status == 200
        assert await refused.is_closed()


@on_a_loop
async def test_while_idle_callers_can_go_every_newcomer_is_answered_though_all_come_at_once() -> None:
    async with listening(max_connections=64) as server, AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(server.connect()) for _ in range(64)]
        for caller in idle:
            await caller.send(GET)
            assert (await caller.answer()).status == 200

        async def ask() -> Answer:
            async with server.connect() as newcomer:
                await asyncio.sleep(0)  # others connect before it asks
                await newcomer.send(GET)
                return await newcomer.answer()

        assert [answer.status for answer in await asyncio.gather(*(ask() for _ in range(48)))] == [200] * 48


@on_a_loop
async def test_a_caller_whose_body_crawls_makes_room_and_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(max_connections=1) as server, server.connect() as crawler:
        await crawler.send(post(bytes(100))[:-50])
        await until(lambda: bool(service_in(server.app).receiving._arriving))
        assert await refused_for_room(server)
        with monkeypatch.context() as later:
            later.setattr(service_in(server.app).receiving, "_clock", lambda: time.monotonic() + 2)
            assert (await server.ask(GET)).status == 200
        answer = await crawler.answer()
        assert (answer.status, answer.code, answer.headers["connection"]) == (408, "request_timeout", "close")
        assert await crawler.is_closed()
    assert server.app.metric("vit_cancelled_total") == 0
    assert server.app.metric("vit_requests_total", endpoint="/classify", code="408") == 1


@on_a_loop
async def test_one_that_crawls_on_after_it_was_told_so_is_closed_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(max_connections=1) as server, server.connect() as crawler:
        monkeypatch.setattr(service_in(server.app).receiving, "_clock", lambda: 0.0)
        await crawler.send(post(bytes(100))[:-50])
        await until(lambda: bool(service_in(server.app).receiving._arriving))
        monkeypatch.setattr(service_in(server.app).receiving, "_clock", lambda: 2.0)
        async with server.connect() as second:
            assert (await crawler.answer()).status == 408
            assert len(server.state.connections) == 2
            async with server.connect() as third:
                await until(lambda: len(server.state.connections) == 2)
                assert await crawler.is_closed()
                for one in (second, third):
                    await one.send(GET)
                    assert (await one.answer()).status == 200


async def refused_for_room(server: Listening) -> bool:
    async with server.connect() as caller:
        return (await caller.answer()).code == "receiving_full"


@on_a_loop
async def test_who_is_being_answered_makes_no_room_and_one_more_is_503() -> None:
    async with listening(max_connections=1) as server, server.connect() as busy:
        server.app.engine.gate.clear()
        await busy.send(post(png(1)))
        await until(lambda: server.app.engine.waiting == 1)
        async with server.connect() as refused:
            answer = await refused.answer()
            assert (answer.status, answer.code) == (503, "receiving_full")
            assert int(answer.headers["retry-after"]) >= 1
            assert await refused.is_closed()
        server.app.engine.gate.set()
        assert (await busy.answer()).status == 200


@on_a_loop
@pytest.mark.parametrize(("count", "status"), [(255, 200), (256, 400)])
async def test_headers_are_counted(count: int, status: int) -> None:
    async with listening() as server:
        head = GET.removesuffix(b"\r\n") + b"a:\r\n" * count + b"\r\n"
        assert (await server.ask(head)).status == status
