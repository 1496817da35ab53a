"""Scrapes share texts, whose writing takes a bounded share of the event loop's time."""

import asyncio

import pytest

from service.observe.scrapes import Scrapes
from tests.service.fakes import on_a_loop

SECONDS = 0.03
"""Time that writing a text takes."""


class Clock:
    """A clock that only writing and sleeping move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.begun: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.now += seconds

    async def write(self) -> bytes:
        self.begun.append(round(self.now, 3))
        self.now += SECONDS
        return str(len(self.begun)).encode()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scrapes(clock: Clock) -> Scrapes:
    return Scrapes(clock.write, clock, clock.sleep)


@on_a_loop
async def test_simultaneous_scrapes_share_a_text(scrapes: Scrapes, clock: Clock) -> None:
    assert await asyncio.gather(*(scrapes.text() for _ in range(50))) == 50 * [b"1"]
    assert clock.begun == [0.0]


@on_a_loop
async def test_a_scrape_gets_no_earlier_text(scrapes: Scrapes) -> None:
    assert [await scrapes.text() for _ in range(3)] == [b"1", b"2", b"3"]


@on_a_loop
async def test_texts_take_a_fifth_of_the_time(scrapes: Scrapes, clock: Clock) -> None:
    for _ in range(4):
        await asyncio.gather(*(scrapes.text() for _ in range(8)))
    assert clock.begun == [0.0, 0.15, 0.3, 0.45]


@on_a_loop
async def test_a_slow_text_delays_no_scrape_long(clock: Clock) -> None:
    async def write() -> bytes:
        clock.now += 10
        return await clock.write()

    scrapes = Scrapes(write, clock, clock.sleep)
    await scrapes.text()
    ended = clock.now
    await scrapes.text()
    assert clock.begun[1] - ended == pytest.approx(11)  # a pause of a second, and its own ten


@on_a_loop
async def test_a_disconnect_keeps_the_others_text(scrapes: Scrapes) -> None:
    leaving = asyncio.ensure_future(scrapes.text())
    staying = asyncio.ensure_future(scrapes.text())
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == b"1"


@on_a_loop
async def test_a_failed_text_ends_its_scrapes_alone(clock: Clock) -> None:
    failures = iter([True, False])

    async def write() -> bytes:
        if next(failures):
            raise RuntimeError("a collector failed")
        return await clock.write()

    scrapes = Scrapes(write, clock, clock.sleep)
    failed = await asyncio.gather(scrapes.text(), scrapes.text(), return_exceptions=True)
    assert [type(error) for error in failed] == [RuntimeError, RuntimeError]
    assert await scrapes.text() == b"1"
