import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import ModelLoading, QueueFull
from service.web.limiter import Limiter, Permit


def take(limiter: Limiter, caller: str) -> Permit:
    """Take a slot for a caller."""
    permit = Permit(limiter, caller)
    permit.extend()
    return permit


def flood(limiter: Limiter, caller: str) -> int:
    """Take slots for a caller until one is refused, and return their number."""
    for taken in range(limiter.capacity + 1):
        try:
            take(limiter, caller)
        except QueueFull:
            return taken
    raise AssertionError("more slots than the capacity")


def test_a_flood_leaves_slots_to_others():
    limiter = Limiter(256)
    assert flood(limiter, "flood") == 224
    with take(limiter, "honest"), take(limiter, "another"):
        assert limiter.in_use == 226


def test_a_refusal_names_the_held_slots():
    limiter = Limiter(16)
    flood(limiter, "flood")
    with pytest.raises(QueueFull, match=r"this caller holds 14 of 16 slots"):
        take(limiter, "flood")


def test_waiting_for_models_is_shared():
    limiter = Limiter(64)
    with contextlib.ExitStack() as stack:
        for _ in range(14):
            stack.enter_context(limiter.waiting("flood"))
        with pytest.raises(ModelLoading), limiter.waiting("flood"):
            pass
        with limiter.waiting("honest"):
            assert limiter.in_use == 15


def test_a_small_capacity_is_not_shared():
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
def test_every_slot_is_given_back(requests):
    limiter = Limiter(64)
    permits = []
    for caller, count, action in requests:
        permit = take(limiter, caller)
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
    assert flood(limiter, "a") == 56  # earlier requests do not count
