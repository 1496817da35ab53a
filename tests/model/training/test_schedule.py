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
    assert Schedule(steps=100, seconds=None).progress(25, 1e9) == 0.25
    limited = Schedule(steps=100, seconds=60.0)
    assert limited.progress(25, 6.0) == 0.25
    assert limited.progress(25, 30.0) == 0.5
    assert limited.progress(25, 60.0) == 1.0


def test_what_is_left_is_the_steps_at_their_pace_within_the_time_limit_and_never_negative() -> None:
    assert Schedule(steps=100, seconds=None).seconds_left(25, 50.0, 2.0) == 150.0
    limited = Schedule(steps=100, seconds=60.0)
    assert limited.seconds_left(25, 50.0, 2.0) == 10.0
    assert limited.seconds_left(98, 50.0, 2.0) == 4.0
    assert limited.seconds_left(25, 61.0, 2.0) == 0.0
