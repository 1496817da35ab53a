"""The traffic generator tells outcomes apart, and the soak's slope is the line's."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from PIL import Image

from benchmarks.reliability.chaos import paeth_png
from benchmarks.reliability.flood import Flood, Outcomes
from benchmarks.reliability.flood import post as post_bytes
from benchmarks.reliability.http_caller import Cut, HttpCaller, NoAnswer, NotConnected
from benchmarks.reliability.soak import slope
from benchmarks.reliability.traffic import Kind, Outcome, Traffic, learn
from tests.launcher import free_port

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def caller_of(handler: Handler, patience: float = 10) -> AsyncIterator[HttpCaller]:
    async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await handler(reader, writer)
        writer.close()

    server = await asyncio.start_server(quiet, "127.0.0.1", 0)
    caller = HttpCaller("127.0.0.1", server.sockets[0].getsockname()[1], patience=patience)
    async with server:
        yield caller
        caller.close()


def classifier(mixes_up: list[bool]) -> Handler:
    """Answer each body by its length, as a model would; the same for all while `mixes_up` is not empty."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(size)
            body = json.dumps({"predictions": [{"index": 0 if mixes_up else size, "score": 0.9}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    return serve


@pytest.mark.parametrize("mixes_up", [False, True])
def test_an_answer_that_is_another_pictures_is_seen(mixes_up: bool) -> None:
    async def run() -> Traffic:
        switch: list[bool] = []
        async with caller_of(classifier(switch)) as caller:
            pictures = await learn(caller, [bytes(size) for size in range(1, 9)])
            switch += [True] if mixes_up else []
            traffic = Traffic(caller, pictures, seed=0, mix={Kind.CLASSIFY: 1})
            await traffic.run(1000, 0.05)
            return traffic

    found = asyncio.run(run())
    assert sum(found.counts.values()) > 10
    assert (found.counts[Kind.CLASSIFY, Outcome.MIXED_UP] > 0) is mixes_up
    assert (found.faults > 0) is mixes_up


def test_a_connection_that_ends_before_the_answer_is_a_cut() -> None:
    async def halfway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")

    async def run() -> None:
        async with caller_of(halfway) as caller:
            with pytest.raises(Cut):
                await caller.ask(REQUEST)

    asyncio.run(run())


def test_no_answer_in_time_is_told() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def run() -> None:
        async with caller_of(silent, patience=0.01) as caller:
            with pytest.raises(NoAnswer):
                await caller.ask(REQUEST)

    asyncio.run(run())


def test_nobody_there_is_told() -> None:
    with pytest.raises(NotConnected):
        asyncio.run(HttpCaller("127.0.0.1", free_port(), patience=10).ask(REQUEST))


def test_pictures_that_the_model_does_not_tell_apart_are_refused() -> None:
    async def run() -> None:
        async with caller_of(classifier([True])) as caller:
            await learn(caller, [bytes(size) for size in range(1, 9)])

    with pytest.raises(ValueError, match="only 1 of 8"):
        asyncio.run(run())


@pytest.mark.parametrize(("growth", "grows"), [(0.0, False), (0.5, True)])
def test_the_slope_is_that_of_the_line_with_an_interval_around_it(growth: float, grows: bool) -> None:
    noise = random.Random(0)
    samples = [
        {"requests": 20.0 * index, "rss_mib": 500 + growth * 20 * index / 1000 + noise.gauss(0, 1)}
        for index in range(2500)
    ]
    found, half = slope(samples, "rss_mib")
    assert abs(found - growth) <= 2 * half
    assert (found - half > 0) is grows


def test_the_slow_picture_is_a_picture() -> None:
    with Image.open(io.BytesIO(paeth_png(40))) as picture:
        picture.load()
        assert picture.size == (40, 40)


@contextlib.contextmanager
def answering(handler: Handler) -> Iterator[int]:
    """A server on a thread, and its port."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(handler, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("way", [lambda flood: flood.open_loop(300, 0.1), lambda flood: flood.closed_loop(4, 0.1)])
def test_the_flood_tells_answers_and_refusals_apart(kept: bool, way: Callable[[Flood], Outcomes]) -> None:
    turn = itertools.count()
    statuses: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                assert b"Content-Length: 90000" in await reader.readuntil(b"\r\n\r\n")
                status = (200, 503, 404)[next(turn) % 3]
                statuses.append(status)
                answer = b"HTTP/1.1 %d X\r\nContent-Length: 2\r\n%s\r\n" % (
                    status,
                    b"" if kept else b"Connection: close\r\n",
                )
                for part in (answer[:20], answer[20:], b"ok"):  # before the body is here
                    writer.write(part)
                    await writer.drain()
                await reader.readexactly(90000)
                if not kept:
                    break
        writer.close()

    with answering(serve) as port:
        outcomes = way(Flood(("127.0.0.1", port), [post_bytes(bytes(90000))]))
    assert len(outcomes.answered) == statuses.count(200) > 0
    assert len(outcomes.refused) == statuses.count(503)
    assert outcomes.other == statuses.count(404)
    assert outcomes.lost == 0
    assert kept or outcomes.connected >= len(statuses)


def test_the_flood_counts_connections_that_break() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    with answering(serve) as port:
        outcomes = Flood(("127.0.0.1", port), [post_bytes(b"x")]).open_loop(100, 0.1)
    assert outcomes.lost == outcomes.connected == len(outcomes.late) > 0
