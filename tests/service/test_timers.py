"""Moments that share one timer of the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from service.timers import TimeLimit, Timers
from tests.service.fakes import PATIENCE, on_a_loop


@on_a_loop
async def test_each_moment_comes_in_its_turn_unless_it_is_cleared() -> None:
    timers, rung = Timers(), list[str]()
    last = asyncio.Event()
    timers.set("b", 0.04, lambda: rung.append("b"))
    timers.set("a", 0.01, lambda: rung.append("a"))
    timers.set("never", 0.02, lambda: rung.append("never"))
    timers.set("last", 0.06, last.set)
    timers.clear("never")
    timers.clear("unknown")
    async with asyncio.timeout(PATIENCE):
        await last.wait()
    assert rung == ["a", "b"]


@on_a_loop
async def test_moments_that_never_come_take_one_timer_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers, taken = asyncio.get_running_loop(), Timers(), list[float]()
    call_at = loop.call_at

    def counted(when: float, *rest: Any) -> asyncio.TimerHandle:
        taken.append(when)
        return call_at(when, *rest)

    monkeypatch.setattr(loop, "call_at", counted)
    for number in range(100):
        timers.set(number, 60 + number, pytest.fail)
        timers.clear(number)
    assert len(taken) == 1


@on_a_loop
async def test_what_lasts_too_long_is_a_timeout_and_what_ends_in_time_is_none() -> None:
    timers = Timers()
    with TimeLimit(timers, PATIENCE) as limit:
        await asyncio.sleep(0)
    assert not limit.expired
    with pytest.raises(TimeoutError), TimeLimit(timers, 0.01):
        await asyncio.sleep(PATIENCE)
    this = asyncio.current_task()
    assert this is not None
    assert this.cancelling() == 0


@on_a_loop
async def test_who_is_cancelled_by_others_stays_cancelled_though_the_time_is_up_too() -> None:
    async def limited(limit: TimeLimit) -> None:
        with limit:
            await asyncio.sleep(PATIENCE)

    for expires in (False, True):
        limit = TimeLimit(Timers(), PATIENCE)
        running = asyncio.create_task(limited(limit))
        await asyncio.sleep(0)
        running.cancel()
        if expires:
            limit.expire()
        await asyncio.wait((running,))
        assert running.cancelled()
