import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model.images.preprocess import ModelInput, Region
from service.web.image_stores import MemoryImageStore, new_image_id
from tests.service.web.apps import Clock


def picture(value: int, side: int = 16) -> ModelInput:
    return ModelInput(np.full((side, side, 3), value, np.uint8), Region(value, 0.25, 3, 4))


def kept(max_bytes: int = 1 << 20, ttl: float = 60) -> tuple[MemoryImageStore, Clock]:
    clock = Clock()
    return MemoryImageStore(ttl=ttl, max_bytes=max_bytes, clock=clock), clock


def put(store: MemoryImageStore, kept_picture: ModelInput) -> str:
    image_id = new_image_id()
    assert asyncio.run(store.put(kept_picture, image_id))
    return image_id


def test_each_id_leads_to_its_own_picture() -> None:
    store, _ = kept()
    ids = [put(store, picture(value)) for value in range(20)]
    for value, image_id in enumerate(ids):
        found = asyncio.run(store.get(image_id))
        assert found is not None
        assert (found.pixels == value).all()
        assert found.region == (value, 0.25, 3, 4)


def test_picture_expires_after_its_ttl() -> None:
    store, clock = kept(ttl=60)
    first = put(store, picture(1))
    clock.now += 30
    second = put(store, picture(2))
    clock.now += 29.9
    assert asyncio.run(store.get(first)) is not None
    clock.now += 0.1
    assert asyncio.run(store.get(first)) is None
    assert asyncio.run(store.get(second)) is not None
    assert store.usage()[0] == 1


def test_full_memory_evicts_the_oldest() -> None:
    bound = 5_000
    store, _ = kept(max_bytes=bound)
    ids = [put(store, picture(value)) for value in range(50)]
    count, used, evicted = store.usage()
    assert evicted == 50 - count
    assert 0 < used <= bound
    assert used >= count * picture(0).pixels.nbytes
    alive = [asyncio.run(store.get(image_id)) is not None for image_id in ids]
    assert alive == [False] * (50 - count) + [True] * count


def test_huge_picture_evicts_nothing() -> None:
    store, _ = kept(max_bytes=2_000)
    image_id = put(store, picture(1))
    assert not asyncio.run(store.put(picture(2, side=100), "id"))
    assert asyncio.run(store.get(image_id)) is not None
    exact, _ = kept(max_bytes=store.usage().size)
    for value in (1, 2):  # one picture fills it
        put(exact, picture(value))
    assert exact.usage() == (1, store.usage().size, 1)


def test_zero_keeps_nothing() -> None:
    for store, _ in (kept(ttl=0), kept(max_bytes=0)):
        assert not asyncio.run(store.put(picture(1), "id"))
        assert store.usage() == (0, 0, 0)


_PUT = st.tuples(st.just("put"), st.integers(0, 5), st.integers(1, 40))
_WAIT = st.tuples(st.just("wait"), st.just(0), st.integers(1, 40))


@given(st.lists(st.one_of(_PUT, _WAIT), max_size=60))
def test_bytes_are_the_sum_of_all_sizes(steps: list[tuple[str, int, int]]) -> None:
    asyncio.run(require_sums(steps))


async def require_sums(steps: list[tuple[str, int, int]]) -> None:
    store, clock = kept(max_bytes=9_000, ttl=60)
    of_one = kept()[0]
    await of_one.put(picture(0, side=1), "id")
    overhead = of_one.usage().size - 3
    latest: dict[str, tuple[float, ModelInput]] = {}
    for action, number, amount in steps:
        if action == "wait":
            clock.now += amount
        elif await store.put(picture(number, side=amount), str(number)):
            latest[str(number)] = (clock.now + 60, picture(number, side=amount))
        found = {name: await store.get(name) for name in latest}
        held = {name: each for name, each in found.items() if each is not None}
        assert (
            store.usage().size
            == sum(each.pixels.nbytes + overhead for each in held.values())
            <= 9_000
        )
        assert store.usage().pictures == len(held)
        for name, each in held.items():
            expires, expected = latest[name]
            assert clock.now < expires
            assert (each.pixels == expected.pixels).all()


def test_evicted_pictures_tell_their_age() -> None:
    clock = Clock()
    ages: list[float] = []
    size = kept()[0]
    put(size, picture(0))
    store = MemoryImageStore(
        ttl=60, max_bytes=size.usage().size, clock=clock, on_evicted=ages.append
    )
    put(store, picture(1))
    clock.now += 12.5
    put(store, picture(2))
    clock.now += 60  # this picture has expired
    put(store, picture(3))
    assert ages == [12.5]
