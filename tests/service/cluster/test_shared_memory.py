"""What processes share: nobody loses count, also when one is killed in the middle."""

from __future__ import annotations

import errno
from contextlib import closing

import numpy as np
import pytest

from service.cluster.shared_memory import (
    ImageSlots,
    SharedCounters,
    SharedFile,
    SharedText,
    whole_pages,
)
from service.errors import QueueFull, TooManyRequests
from tests.service.cluster.scripts import run


def test_places_are_counted_over_all_workers() -> None:
    with closing(SharedCounters(workers=2, engines=1, capacity=3)) as counters:
        one, two = counters.limiter(0), counters.limiter(1)
        with one.permit() as both, two.permit():
            both.extend()
            for places in (one, two):
                with pytest.raises(QueueFull, match="all 3 places"):
                    places.permit()
            assert counters.permits_taken.tolist() == [2, 1]
        with two.permit():
            assert counters.permits_taken.tolist() == [0, 1]


def test_a_request_that_gets_too_few_places_gives_all_of_them_back() -> None:
    with closing(SharedCounters(workers=2, engines=1, capacity=3)) as counters:
        other, places = counters.limiter(0), counters.limiter(1)
        with other.permit():
            with pytest.raises(QueueFull), places.permit() as permit:
                permit.extend()
                permit.extend()
            assert counters.permits_taken.tolist() == [1, 0]


def test_looking_for_places_looks_at_all_workers() -> None:
    with closing(SharedCounters(workers=2, engines=1, capacity=3)) as counters:
        with counters.limiter(0).permit():
            counters.limiter(1).check(2)
            with pytest.raises(QueueFull):
                counters.limiter(1).check(3)
        assert counters.permits_taken.tolist() == [0, 0]


def test_bytes_of_bodies_are_counted_over_all_workers_and_those_of_a_dead_one_are_free_again() -> None:
    with closing(SharedCounters(workers=2, engines=1, capacity=3)) as counters:
        one, two = (counters.byte_budget(worker, capacity=100) for worker in range(2))
        assert one.take(60)
        assert not two.take(41)
        assert two.take(40)
        assert not one.take(1)
        two.give_back(40)
        assert counters.received_bytes.tolist() == [60, 0]
        assert two.take(40)
        counters.forget_worker(0)
        assert two.take(60)


def test_a_dead_workers_places_are_free_again() -> None:
    with closing(SharedCounters(workers=2, engines=2, capacity=2)) as counters:
        dead = counters.limiter(0)
        dead.acquire()
        dead.acquire()
        counters.outstanding[0] = (1, 1)
        counters.worker_state[0] = SharedCounters.SERVING
        counters.forget_worker(0)
        assert not counters.outstanding.any()
        assert not counters.worker_state.any()
        with counters.limiter(1).permit() as permit:
            permit.extend()


def test_processes_never_take_more_places_than_there_are() -> None:
    """Each takes and gives back as fast as it can, and looks whether too many were ever taken."""
    script = """
import os
from service.cluster.shared_memory import SharedCounters
from service.errors import QueueFull, TooManyRequests

counters = SharedCounters(workers=3, engines=1, capacity=2)
for worker in range(3):
    if os.fork() == 0:
        places, refused, taken = counters.limiter(worker), 0, 0
        while taken < 3000:
            try:
                places.acquire()
            except QueueFull:
                refused += 1
                continue
            taken += 1
            assert counters.permits_taken.sum() <= 2
            places.release()
        os._exit(0)
codes = [os.wait()[1] for _ in range(3)]
print(codes, counters.permits_taken.tolist())
"""
    assert run(script) == "[0, 0, 0] [0, 0, 0]"


def test_a_lock_ends_with_the_process_that_held_it() -> None:
    script = """
import os, signal
from service.cluster.shared_memory import SharedFile

file = SharedFile("test")
ready, told = os.pipe()
child = os.fork()
if child == 0:
    with file.locked():
        os.write(told, b"x")
        signal.pause()
os.read(ready, 1)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
with file.locked():
    print("mine")
"""
    assert run(script) == "mine"


def test_a_lock_is_held_until_its_block_ends_also_by_an_error() -> None:
    script = """
import fcntl, os
from service.cluster.shared_memory import SharedFile

file = SharedFile("test")

def another_gets_it():
    child = os.fork()
    if child == 0:
        try:
            fcntl.lockf(file._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0

seen = []
try:
    with file.locked():
        seen.append(another_gets_it())
        raise KeyError
except KeyError:
    seen.append(another_gets_it())
with file.locked():
    seen.append(another_gets_it())
print(*seen, another_gets_it())
"""
    assert run(script) == "False True False True"


def test_each_workers_pixels_are_its_own_and_the_engine_sees_all() -> None:
    shape, slots = (8, 6, 3), 5
    file = SharedFile("test")
    file.grow(2 * ImageSlots.size(slots, shape))
    seen_by_engine = [ImageSlots(file, worker, slots, shape) for worker in (0, 1)]
    seen_by_workers = [ImageSlots(file, worker, slots, shape) for worker in (0, 1)]
    for worker, pixels in enumerate(seen_by_workers):
        for slot in range(slots):
            pixels[slot][...] = 10 * worker + slot
    for worker, pixels in enumerate(seen_by_engine):
        for slot in range(slots):
            assert pixels[slot].shape == shape
            assert (pixels[slot] == 10 * worker + slot).all()
    with pytest.raises(IndexError):
        seen_by_engine[0][slots]
    file.close()


def test_a_file_in_memory_never_shrinks_under_those_who_map_it() -> None:
    file = SharedFile("test")
    file.grow(whole_pages(10_000))
    memory = file.map(whole_pages(10_000))
    file.grow(1)
    assert np.frombuffer(memory, np.uint8).sum() == 0
    file.close()


def test_a_keys_requests_are_counted_over_all_workers() -> None:
    with closing(SharedCounters(workers=2, engines=1, capacity=9, keys=2)) as counters:
        one, two = (counters.key_limiter(worker, limit=2) for worker in range(2))
        one.acquire(0)
        two.acquire(0)
        for limiter in (one, two):
            with pytest.raises(TooManyRequests, match="2 requests in flight"):
                limiter.acquire(0)
        one.acquire(1)
        assert counters.key_requests.tolist() == [[1, 1], [1, 0]]
        one.release(1)
        assert counters.key_requests.tolist() == [[1, 0], [1, 0]]
        counters.forget_worker(1)  # it died
        one.acquire(0)
        assert two.limit == 2


def test_zero_limits_no_key() -> None:
    with closing(SharedCounters(workers=1, engines=1, capacity=9, keys=1)) as counters:
        limiter = counters.key_limiter(0, limit=0)
        for _ in range(100):
            limiter.acquire(0)
        assert counters.key_requests.tolist() == [[100]]


def test_memory_that_cannot_be_given_back_is_an_error_with_the_systems_reason() -> None:
    file = SharedFile("test")
    file.grow(whole_pages(1))
    with pytest.raises(OSError, match="Invalid argument") as raised:
        file.free(0, 0)
    assert raised.value.errno == errno.EINVAL
    file.close()


@pytest.mark.parametrize("start", [0, 5 << 30], ids=["at the beginning", "behind 4 GiB"])
def test_pages_that_are_given_back_read_as_zeros_and_all_others_stay(start: int) -> None:
    file, page = SharedFile("test"), whole_pages(1)
    for place in (1 << 30, start):
        file.write(place, b"x" * 3 * page)
    file.free(start + page, page)
    assert file.read(start, 3 * page) == b"x" * page + bytes(page) + b"x" * page
    assert file.read(1 << 30, 3 * page) == b"x" * 3 * page
    file.close()


def test_a_service_is_ready_when_all_engines_are_and_all_workers_know() -> None:
    with closing(SharedCounters(workers=2, engines=2, capacity=1)) as counters:
        assert not counters.all_ready()
        counters.engine_ready[:] = 1
        for state in (SharedCounters.LISTENING, SharedCounters.SERVING):
            counters.worker_state[1] = state
            assert not counters.all_ready()
        counters.worker_state[0] = SharedCounters.SERVING
        assert counters.all_ready()
        counters.worker_state[0] = SharedCounters.LISTENING
        assert not counters.all_ready()
        counters.worker_state[0] = SharedCounters.SERVING
        counters.forget_engine(1)
        assert not counters.all_ready()


def test_a_text_that_is_written_while_it_is_read_is_the_old_one_or_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    text = SharedText('{"compile": "off", "max_batch": 16}')
    memory = text._memory

    class WrittenMeanwhile:
        """The memory, which another process writes after its first read."""

        def __init__(self) -> None:
            self.reads = 0

        def __getitem__(self, part: slice) -> bytes:
            self.reads += 1
            found = memory[part]
            if self.reads == 1:
                monkeypatch.setattr(text, "_memory", memory)
                text.write('{"compile": "on"}')
                monkeypatch.setattr(text, "_memory", self)
            return found

    monkeypatch.setattr(text, "_memory", WrittenMeanwhile())
    assert text.read() == '{"compile": "on"}'
