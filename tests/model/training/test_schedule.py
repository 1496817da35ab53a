from __future__ import annotations

import pytest

from model.training.optimisers import Schedule, rate_factor


def test_the_rate_rises_then_falls_to_zero() -> None:
    factors = [rate_factor(step / 1000, 0.1) for step in range(1001)]
    assert factors.index(max(factors)) == 100
    assert max(factors) == pytest.approx(1.0)
    assert factors[:101] == sorted(factors[:101])
    assert factors[100:] == sorted(factors[100:], reverse=True)
    assert factors[0] > 0
    assert factors[-1] == pytest.approx(0.0, abs=1e-9)


def test_a_schedule_without_warm_up_starts_at_its_peak() -> None:
    assert rate_factor(0.0, 0.0) == pytest.approx(1.0)


def test_progress_is_that_of_the_steps_or_of_the_time_whichever_is_further() -> None:
    assert Schedule(steps=100, seconds=None).at(25, 1e9) == (0.25, False)
    limited = Schedule(steps=100, seconds=60.0)
    assert limited.at(25, 6.0) == (0.25, False)
    assert limited.at(25, 30.0) == (0.5, False)
    assert limited.at(25, 60.0) == (1.0, False)


def test_a_second_cycle_is_a_schedule_of_what_is_left() -> None:
    restarted = Schedule(steps=40, seconds=None, restart=0.7)
    whole = Schedule(steps=28, seconds=None)
    assert [restarted.at(step, 0.0) for step in range(28)] == [whole.at(step, 0.0) for step in range(28)]
    assert [restarted.at(step, 0.0) for step in (28, 34, 40)] == [(0.0, True), (0.5, True), (1.0, True)]
    assert Schedule(steps=10, seconds=None, restart=0.99).at(9, 0.0) == (0.0, True), "a step is left for it"
    assert Schedule(steps=1, seconds=None, restart=0.6).at(1, 0.0) == (1.0, False), "one step is one cycle"
    limited = Schedule(steps=100, seconds=60.0, restart=0.5)
    assert [limited.at(0, seconds) for seconds in (15.0, 30.0, 45.0)] == [(0.5, False), (0.0, True), (0.5, True)]


def test_what_is_left_is_the_steps_at_their_pace_within_the_time_limit_and_never_negative() -> None:
    assert Schedule(steps=100, seconds=None).seconds_left(25, 50.0, 2.0) == 150.0
    limited = Schedule(steps=100, seconds=60.0)
    assert limited.seconds_left(25, 50.0, 2.0) == 10.0
    assert limited.seconds_left(98, 50.0, 2.0) == 4.0
    assert limited.seconds_left(25, 61.0, 2.0) == 0.0
