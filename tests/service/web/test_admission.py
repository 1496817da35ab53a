from __future__ import annotations

import asyncio

import pytest

from service.errors import QueueFull
from service.http.exchange import Exchange
from service.web.admission import Limiter, RefusalPace
from tests.service.fakes import PATIENCE, on_a_loop
from tests.service.web.apps import Clock


def test_places_are_given_back_when_the_context_ends() -> None:
    limiter = Limiter(2)
    with limiter.permit(), limiter.permit():
        assert limiter.in_use == 2
    assert limiter.in_use == 0


def test_a_place_beyond_the_capacity_is_refused_and_takes_nothing() -> None:
    limiter = Limiter(1)
    with limiter.permit():
        with pytest.raises(QueueFull, match="all 1 places"):
            limiter.permit()
        assert limiter.in_use == 1


def test_a_request_that_gets_too_few_places_gives_all_of_them_back() -> None:
    limiter = Limiter(3)
    with limiter.permit():
        with pytest.raises(QueueFull), limiter.permit() as permit:
            permit.extend()
            permit.extend()
        assert limiter.in_use == 1


def test_a_permit_gives_its_places_back_once() -> None:
    limiter = Limiter(3)
    with limiter.permit():
        permit = limiter.permit()
        for places in (1, 2):
            with permit:
                assert limiter.in_use == 1 + places
            assert limiter.in_use == 1
            permit.extend(2)
        with permit:
            pass
        with permit:
            assert limiter.in_use == 1


def test_looking_for_places_takes_none() -> None:
    limiter = Limiter(3)
    with limiter.permit():
        limiter.check(2)
        with pytest.raises(QueueFull, match="all 3 places"):
            limiter.check(3)
        assert limiter.in_use == 1


def test_places_are_given_back_after_an_error() -> None:
    limiter = Limiter(5)
    with pytest.raises(ZeroDivisionError), limiter.permit() as permit:
        permit.extend()
        raise ZeroDivisionError
    assert limiter.in_use == 0


class Clocked:
    """Refusals of a pace without credit, and the order in which they went out."""

    def __init__(self, pace: RefusalPace | None = None) -> None:
        self.pace = pace or RefusalPace()
        self.out: list[int] = []

    async def spend(self) -> None:
        for _ in range(1000):
            await self.pace.turn(Exchange())

    async def refuse(self, number: int, exchange: Exchange | None = None) -> None:
        await self.pace.turn(exchange or Exchange())
        self.out.append(number)


@on_a_loop
async def test_an_answer_lets_the_five_go_who_have_waited_longest() -> None:
    refusals = Clocked()
    await asyncio.wait_for(refusals.spend(), PATIENCE)
    async with asyncio.TaskGroup() as group:
        for number in range(7):
            group.create_task(refusals.refuse(number))
        await asyncio.sleep(0)
        assert refusals.out == []
        refusals.pace.answered()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert refusals.out == [0, 1, 2, 3, 4]
        refusals.pace.answered()


@on_a_loop
async def test_an_answer_lets_one_go_who_asked_again_within_a_second() -> None:
    clock = Clock()
    refusals = Clocked(RefusalPace(clock))
    await refusals.spend()
    async with asyncio.TaskGroup() as group:
        for number, seconds in enumerate((0.0, 0.9, 1.0, None)):
            exchange = Exchange()
            exchange.refused_before = None if seconds is None else clock.now - seconds
            group.create_task(refusals.refuse(number, exchange))
        await asyncio.sleep(0)
        assert refusals.out == []
        for let_go in ([0], [0, 1], [0, 1, 2, 3]):
            refusals.pace.answered()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert refusals.out == let_go


@on_a_loop
async def test_a_refusal_waits_no_longer_than_retry_after_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.web.admission.LONGEST_WAIT", 0.0)
    refusals = Clocked()
    await refusals.spend()
    await asyncio.wait_for(refusals.refuse(1), PATIENCE)
    assert refusals.out == [1]


@on_a_loop
async def test_a_connection_whose_refusal_waits_gives_way_to_another() -> None:
    refusals, exchange = Clocked(), Exchange()
    await refusals.spend()
    waiting = asyncio.create_task(refusals.refuse(1, exchange))
    await asyncio.sleep(0)
    assert exchange.arriving is not None and exchange.arriving.crawls()
    exchange.arriving.give_way()
    await asyncio.wait_for(waiting, PATIENCE)
    assert exchange.arriving is None
    # The next answer's credit is for others.
    refusals.pace.answered()
    await asyncio.wait_for(refusals.refuse(2), PATIENCE)
