"""Which event loops and processes are taken for frozen, look by look."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from service.http.watchdog import Pulse, Watchdog, keep_beating
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
    watchdog.beats[0] += 1
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
        watchdog.beats[0] += 1
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


def seconds_until_frozen(*, starting: bool, works: bool, step: float = 1.0) -> float:
    """Look at a process that does not beat; return after how many seconds it is frozen."""
    pulse, now = Pulse(), 500.0
    while not pulse.is_frozen(now, 7, now if works else 3.0, starting=starting):
        now += step
        assert now < 700
    return now - 500.0


@pytest.mark.parametrize(
    ("starting", "works", "seconds"), [(False, False, 3), (False, True, 30), (True, False, 60)], ids=str
)
def test_a_process_is_frozen_after_its_time_and_not_before(starting: bool, works: bool, seconds: int) -> None:
    # The first look is the first sign of life that it can be asked for.
    assert seconds_until_frozen(starting=starting, works=works) == seconds


def test_a_process_that_works_while_it_starts_is_never_frozen() -> None:
    pulse = Pulse()
    assert not any(pulse.is_frozen(now, 0, now, starting=True) for now in range(1000))
    assert pulse.silent_seconds > 900


def test_a_beat_ends_both_silences() -> None:
    pulse = Pulse()
    for now in range(3):
        assert not pulse.is_frozen(now, 1, 0.0, starting=False)
    assert (pulse.silent_seconds, pulse.idle_seconds) == (2, 2)
    assert not pulse.is_frozen(3, 2, 0.0, starting=False)
    assert (pulse.silent_seconds, pulse.idle_seconds) == (0, 0)


def test_time_in_which_nobody_looked_counts_for_little() -> None:
    assert seconds_until_frozen(starting=False, works=False, step=50.0) == 100


@on_a_loop
async def test_an_event_loop_beats_twice_a_second_in_its_own_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    cells, slept = np.zeros(3, np.uint64), []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 4:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await keep_beating(cells, 1)
    assert cells.tolist() == [0, 4, 0]
    assert slept == [0.5] * 4
