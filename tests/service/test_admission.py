from __future__ import annotations

import pytest

from service.admission import Places
from service.errors import QueueFull


def test_places_are_given_back_when_the_context_ends() -> None:
    places = Places(2)
    with places.reserve(), places.reserve():
        assert places.taken == 2
    assert places.taken == 0


def test_a_place_beyond_the_capacity_is_refused_and_takes_nothing() -> None:
    places = Places(1)
    with places.reserve():
        with pytest.raises(QueueFull, match="all 1 places"):
            places.reserve()
        assert places.taken == 1


def test_a_request_that_gets_too_few_places_gives_all_of_them_back() -> None:
    places = Places(3)
    with places.reserve():
        with pytest.raises(QueueFull), places.reserve() as reservation:
            reservation.extend()
            reservation.extend()
        assert places.taken == 1


def test_places_are_given_back_after_an_error() -> None:
    places = Places(5)
    with pytest.raises(ZeroDivisionError), places.reserve() as reservation:
        reservation.extend()
        raise ZeroDivisionError
    assert places.taken == 0
