import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import QueueFull
from service.web.admission import Limiter


def flood(limiter: Limiter, caller: str) -> int:
    """Take places for a caller until one is refused, and return how many it got."""
    for taken in range(limiter.capacity + 1):
        try:
            limiter.permit(caller)
        except QueueFull:
            return taken
    raise AssertionError("more places than there are")


def test_flood_leaves_places_to_others():
    limiter = Limiter(256)
    assert flood(limiter, "flood") == 224
    with limiter.permit("honest"), limiter.permit("another"):
        assert limiter.in_use == 226


def test_refusal_says_who_holds_the_places():
    limiter = Limiter(16)
    flood(limiter, "flood")
    with pytest.raises(QueueFull, match=r"this caller have 14 of 16 places; others need the rest"):
        limiter.permit("flood")


def test_few_places_are_not_shared():
    assert flood(Limiter(4), "only") == 4


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(1, 40),
            st.sampled_from(("lend", "release", "close")),
        )
    )
)
def test_all_places_come_back(requests):
    limiter = Limiter(64)
    permits = []
    for caller, count, action in requests:
        permit = limiter.permit(caller)
        with contextlib.suppress(QueueFull):
            permit.extend(count)
        if action == "lend":
            with permit.lent():
                assert limiter.in_use <= limiter.capacity
        if action == "release":
            permit.release()
        if action == "close" or limiter.in_use > 50:
            permit.close()
        permits.append(permit)
    for permit in permits:
        permit.close()
    assert limiter.in_use == 0
    assert flood(limiter, "a") == 56  # nothing of an earlier request counts
