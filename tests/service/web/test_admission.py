from __future__ import annotations

import pytest

from service.errors import QueueFull
from service.web.admission import Limiter


def test_places_are_given_back_when_the_context_ends() -> None:
    places = Limiter(2)
    with places.reserve(), places.reserve():
        assert places.taken == 2
    assert places.taken == 0


def test_a_place_beyond_the_capacity_is_refused_and_takes_nothing() -> None:
    places = Limiter(1)
    with places.reserve():
        with pytest.raises(QueueFull, match="all 1 places"):
            places.reserve()
        assert places.taken == 1


def test_a_request_that_gets_too_few_places_gives_all_of_them_back() -> None:
    places = Limiter(3)
    with places.reserve():
        with pytest.raises(QueueFull), places.reserve() as permit:
            permit.extend()
            permit.extend()
        assert places.taken == 1


def test_places_are_given_back_after_an_error() -> None:
    places = Limiter(5)
    with pytest.raises(ZeroDivisionError), places.reserve() as permit:
        permit.extend()
        raise ZeroDivisionError
    assert places.taken == 0
