"""Pictures kept by several workers together."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from model.images.preprocess import ModelInput
from model.images.region import Region
from service.cluster.shared_image_store import SharedImageStore
from service.cluster.shared_memory import SharedFile

CELL = 4096
"""A small picture takes one page."""
MIB = 1 << 20


class Kept:
    """One memory and two workers that use it."""

    def __init__(self, file: SharedFile, ttl: float, max_bytes: int) -> None:
        self.now = 50
        self.one, self.two = (
            SharedImageStore(file, ttl=ttl, max_bytes=max_bytes, clock=lambda: self.now) for _ in range(2)
        )


@pytest.fixture
def file() -> Iterator[SharedFile]:
    file = SharedFile("recent")
    yield file
    file.close()


@pytest.fixture
def kept(file: SharedFile) -> Kept:
    return Kept(file, ttl=60, max_bytes=5 * CELL)


def picture(value: int, rows: int = 16) -> ModelInput:
    return ModelInput(np.full((rows, 12, 3), value, np.uint8), Region(value, -0.1, 1e6, 1 / 3))


def same(left: ModelInput, right: ModelInput) -> bool:
    return np.array_equal(left.pixels, right.pixels) and left.region == right.region


def put(recent: SharedImageStore, kept_picture: ModelInput) -> str:
    image_id = asyncio.run(recent.put(kept_picture))
    assert image_id is not None
    return image_id


def test_each_id_leads_every_worker_to_its_own_picture(kept: Kept) -> None:
    ids = {value: put(kept.one if value % 2 else kept.two, picture(value)) for value in range(5)}
    for value, image_id in ids.items():
        for recent in (kept.one, kept.two):
            found = asyncio.run(recent.get(image_id))
            assert found is not None
            assert same(found, picture(value))
    assert kept.one.usage() == kept.two.usage() == (5, 5 * CELL, 0)


def test_a_worker_reads_what_was_kept_before_it_came(file: SharedFile) -> None:
    image_id = put(Kept(file, 60, 5 * CELL).one, picture(7))
    found = asyncio.run(Kept(file, 60, 5 * CELL).two.get(image_id))
    assert found is not None
    assert same(found, picture(7))


def test_the_oldest_goes_when_memory_is_full(kept: Kept) -> None:
    ids = [put(kept.one if value % 3 else kept.two, picture(value)) for value in range(23)]
    alive = [asyncio.run(kept.two.get(image_id)) is not None for image_id in ids]
    assert alive == [False] * 18 + [True] * 5
    assert kept.one.usage() == kept.two.usage() == (5, 5 * CELL, 18)


def test_a_picture_is_good_for_its_time_and_no_longer(kept: Kept) -> None:
    first = put(kept.one, picture(1))
    kept.now += 30
    second = put(kept.two, picture(2))
    kept.now += 29
    assert asyncio.run(kept.two.get(first)) is not None
    kept.now += 1
    assert asyncio.run(kept.two.get(first)) is None
    assert asyncio.run(kept.one.get(second)) is not None
    assert kept.one.usage() == (1, CELL, 0)
    kept.now += 30
    assert kept.one.usage() == (0, 0, 0)


def test_an_expired_picture_is_overwritten(file: SharedFile) -> None:
    kept = Kept(file, ttl=60, max_bytes=5 * CELL)
    put(kept.one, picture(77))
    assert bytes([77] * 100) in file.read(0, 10 * CELL)
    kept.now += 60
    kept.two.usage()
    assert bytes([77] * 100) not in file.read(0, 10 * CELL)


def test_a_picture_of_another_size_begins_the_ring_anew_and_frees_the_old_ones(kept: Kept, file: SharedFile) -> None:
    old = [put(kept.one, picture(77)) for _ in range(4)]
    large_one = picture(5, rows=200)
    new = put(kept.two, large_one)
    assert [asyncio.run(kept.one.get(image_id)) for image_id in old] == [None] * 4
    found = asyncio.run(kept.one.get(new))
    assert found is not None
    assert same(found, large_one)
    assert kept.one.usage() == (1, 2 * CELL, 0)
    assert bytes([77] * 100) not in file.read(0, 10 * CELL)
    back = [put(kept.two, picture(6)) for _ in range(6)]
    assert [asyncio.run(kept.one.get(image_id)) is not None for image_id in [new, *back]] == [False, False, *[True] * 5]


class CountingFile(SharedFile):
    """Counts the bytes that change while the lock is held."""

    changed = 0

    def write(self, offset: int, data: bytes) -> None:
        super().write(offset, data)
        self.changed += len(data)

    def free(self, offset: int, size: int) -> None:
        super().free(offset, size)
        self.changed += size


@pytest.mark.parametrize("call", ["put", "get", "usage"])
def test_however_many_pictures_expire_a_call_frees_few_and_none_is_returned(call: str) -> None:
    with closing(CountingFile("many")) as file:
        kept = Kept(file, ttl=60, max_bytes=64 * MIB)
        ids = [put(kept.one, large(value)) for value in range(70)]  # the ring has begun anew
        kept.now += 59
        young = put(kept.one, large(70))
        kept.now += 1
        for _ in range(20):
            file.changed = 0
            if call == "put":
                young = put(kept.two, large(71))
            elif call == "get":
                assert asyncio.run(kept.two.get(ids[-1])) is None
            else:
                assert kept.two.usage() == (1, MIB, 7)
            assert file.changed <= 6 * MIB
        assert all(asyncio.run(kept.one.get(image_id)) is None for image_id in ids)
        assert asyncio.run(kept.one.get(young)) is not None
        count, size, evicted = kept.one.usage()
        assert evicted == 7  # those that expired are none
        assert count == (21 if call == "put" else 1)
        assert size <= memory_of(file) < size + MIB  # the system has back what the others took


def large(value: int) -> ModelInput:
    """A picture whose cell is a MiB."""
    return ModelInput(np.full((1, 1020, 1024), value, np.uint8), Region(0, 0, 1020, 1))


def memory_of(file: SharedFile) -> int:
    return os.fstat(file._descriptor).st_blocks * 512


def test_ids_are_random_and_fit_for_a_url(kept: Kept) -> None:
    ids = {put(kept.one, picture(0)) for _ in range(100)}
    assert len({image_id[:20] for image_id in ids}) == 100
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{32}", image_id) for image_id in ids)


@pytest.mark.parametrize("wrong", ["", "nobody", "é", "A" * 32, "_" * 32, "A" * 31, "A" * 1000, "!" * 32])
def test_an_unknown_id_leads_to_nothing(wrong: str, kept: Kept) -> None:
    put(kept.one, picture(1))
    assert asyncio.run(kept.one.get(wrong)) is None


def test_an_id_that_is_right_but_for_its_random_part_leads_to_nothing(kept: Kept) -> None:
    image_id = put(kept.one, picture(1))
    changed = ("B" if image_id[0] == "A" else "A") + image_id[1:]
    assert asyncio.run(kept.one.get(changed)) is None


def test_pictures_of_another_size_replace_all(kept: Kept) -> None:
    """Only a model that was exchanged under a running service makes them."""
    old = put(kept.one, picture(1))
    new = put(kept.two, picture(2, rows=150))
    assert asyncio.run(kept.one.get(old)) is None
    found = asyncio.run(kept.one.get(new))
    assert found is not None
    assert same(found, picture(2, rows=150))
    assert kept.one.usage() == (1, 2 * CELL, 0)


@pytest.mark.parametrize(("ttl", "max_bytes"), [(0, 5 * CELL), (60, 0), (60, CELL - 1)])
def test_where_nothing_is_kept_there_is_no_id(ttl: float, max_bytes: int, file: SharedFile) -> None:
    kept = Kept(file, ttl, max_bytes)
    assert asyncio.run(kept.one.put(picture(1))) is None
    assert asyncio.run(kept.one.get("A" * 32)) is None
    assert kept.one.usage() == (0, 0, 0)
