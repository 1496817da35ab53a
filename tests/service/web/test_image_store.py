from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from service.web.image_store import MemoryImageStore


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def picture(value: int, side: int = 16) -> NDArray[np.uint8]:
    return np.full((side, side, 3), value, np.uint8)


def kept(max_bytes: int = 1 << 20, ttl: float = 60) -> tuple[MemoryImageStore, Clock]:
    clock = Clock()
    return MemoryImageStore(ttl=ttl, max_bytes=max_bytes, clock=clock), clock


def put(recent: MemoryImageStore, pixels: NDArray[np.uint8]) -> str:
    image_id = recent.put(pixels)
    assert image_id is not None
    return image_id


def test_each_id_leads_to_its_own_picture() -> None:
    recent, _ = kept()
    ids = [put(recent, picture(value)) for value in range(20)]
    for value, image_id in enumerate(ids):
        found = recent.get(image_id)
        assert found is not None
        assert (found == value).all()


def test_ids_are_long_random_and_fit_for_a_url() -> None:
    recent, _ = kept()
    ids = {put(recent, picture(0)) for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{22}", image_id) for image_id in ids)


def test_an_unknown_id_leads_to_nothing() -> None:
    recent, _ = kept()
    put(recent, picture(1))
    assert recent.get("nobody") is None
    assert recent.get("") is None


def test_a_picture_is_good_for_its_time_and_no_longer() -> None:
    recent, clock = kept(ttl=60)
    first = put(recent, picture(1))
    clock.now += 30
    second = put(recent, picture(2))
    clock.now += 29.9
    assert recent.get(first) is not None
    clock.now += 0.1
    assert recent.get(first) is None
    assert recent.get(second) is not None
    assert recent.usage()[0] == 1


def test_looking_does_not_prolong_a_pictures_life() -> None:
    recent, clock = kept(ttl=60)
    image_id = put(recent, picture(1))
    clock.now += 59
    assert recent.get(image_id) is not None
    clock.now += 1
    assert recent.get(image_id) is None


def test_the_oldest_goes_when_memory_is_full_and_the_bound_holds() -> None:
    bound = 5_000
    recent, _ = kept(max_bytes=bound)
    ids = [put(recent, picture(value)) for value in range(50)]
    count, used = recent.usage()
    assert 0 < used <= bound
    assert used >= count * picture(0).nbytes
    alive = [recent.get(image_id) is not None for image_id in ids]
    assert alive == [False] * (50 - count) + [True] * count


def test_a_large_picture_pushes_out_as_many_as_it_needs() -> None:
    recent, _ = kept(max_bytes=20_000)
    small = [put(recent, picture(value)) for value in range(10)]
    large = put(recent, picture(99, side=75))
    assert recent.get(large) is not None
    assert recent.usage()[1] <= 20_000
    assert recent.get(small[0]) is None


def test_a_picture_larger_than_the_memory_is_not_kept_and_pushes_nothing_out() -> None:
    recent, _ = kept(max_bytes=2_000)
    image_id = put(recent, picture(1))
    assert recent.put(picture(2, side=100)) is None
    assert recent.get(image_id) is not None


def test_zero_keeps_nothing() -> None:
    for recent, _ in (kept(ttl=0), kept(max_bytes=0)):
        assert recent.put(picture(1)) is None
        assert recent.usage() == (0, 0)


def test_memory_of_expired_pictures_is_given_back() -> None:
    recent, clock = kept()
    for value in range(10):
        put(recent, picture(value))
    clock.now += 60
    assert recent.usage() == (0, 0)
