"""Which processes are frozen, look by look."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from service.cluster.heartbeat import Pulse, keep_beating
from tests.service.fakes import on_a_loop


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
