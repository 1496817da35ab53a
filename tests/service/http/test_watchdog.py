from __future__ import annotations

import asyncio
import threading

import pytest

from service.http.watchdog import Watchdog
from tests.service.fakes import PATIENCE, on_a_loop
from tests.service.web.apps import Clock


def look_for(watchdog: Watchdog, clock: Clock, seconds: int) -> list[bool]:
    found = []
    for _ in range(seconds):
        clock.now += 1
        found.append(watchdog.look())
    return found


def test_an_event_loop_that_does_not_turn_ends_the_process_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    clock, ended = Clock(), list[int]()
    watchdog = Watchdog(30, clock=clock, end=ended.append)
    watchdog.turn()
    assert look_for(watchdog, clock, 1 + 29) == [False] * 30
    assert ended == []
    assert look_for(watchdog, clock, 1) == [True]
    assert ended == [1]
    assert caplog.messages == ["the event loop has not turned for 30 s: ending"]


def test_an_event_loop_that_never_turned_has_no_more_time_than_another() -> None:
    clock, ended = Clock(), list[int]()
    assert look_for(Watchdog(30, clock=clock, end=ended.append), clock, 30) == [False] * 29 + [True]


def test_every_turn_begins_the_time_anew() -> None:
    clock, ended = Clock(), list[int]()
    watchdog = Watchdog(3, clock=clock, end=ended.append)
    for _ in range(50):
        watchdog.turn()
        look_for(watchdog, clock, 3)
    assert ended == []


def test_time_in_which_the_watchdog_stood_still_too_does_not_count() -> None:
    clock, ended = Clock(), list[int]()
    watchdog = Watchdog(3, clock=clock, end=ended.append)
    clock.now += 3600
    watchdog.look()
    assert ended == []


@on_a_loop
async def test_it_looks_from_a_thread_of_its_own_while_the_loop_is_blocked() -> None:
    ended = threading.Event()
    watchdog = Watchdog(0.001, end=lambda _: ended.set())
    watching = asyncio.create_task(watchdog.watch())
    await asyncio.sleep(0)
    assert ended.wait(PATIENCE)  # blocks this loop
    watching.cancel()


@on_a_loop
async def test_a_loop_turns_twice_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await Watchdog(3600).watch()
    assert slept == [0.5]


def test_a_loop_that_has_ended_ends_no_process() -> None:
    def watchdogs() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "watchdog"}

    async def run() -> set[threading.Thread]:
        watching = asyncio.create_task(Watchdog(3600).watch())
        await asyncio.sleep(0)
        assert not watching.done()
        return watchdogs() - before

    before = watchdogs()
    [thread] = asyncio.run(run())
    assert thread.daemon
    thread.join(PATIENCE)
    assert not thread.is_alive()
