"""The batch queue compared with a model of it, on a clock that only the tests move."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service.engine.batching import BatchQueue, Poll, QueuedItem
from service.errors import EngineUnavailable, QueueFull
from tests.service.web.apps import Clock

# Eighths of a second are exact in floating point.
TICKS = st.integers(0, 80).map(lambda n: n / 8)


def queue(*, capacity: int = 100, max_delay: float = 0.0) -> tuple[BatchQueue[str], Clock]:
    clock = Clock()
    return BatchQueue(capacity=capacity, max_delay=max_delay, clock=clock), clock


def items(entries: list[QueuedItem[str]]) -> list[str]:
    return [entry.item for entry in entries]


class QueueMachine(RuleBasedStateMachine):
    """Do anything that web code and an engine may do, in any order.

    `waiting` contains the entries that must be in the queue, oldest first. Every item must leave
    the queue exactly once.
    """

    @initialize(
        capacity=st.integers(1, 12),
        max_batch=st.integers(1, 9),
        max_delay=st.sampled_from([0.0, 0.5, 2.0]),
    )
    def build(self, capacity: int, max_batch: int, max_delay: float) -> None:
        self.capacity = capacity
        self.max_batch = max_batch
        self.max_delay = max_delay
        self.clock = Clock()
        self.queue: BatchQueue[int] = BatchQueue(
            capacity=capacity, max_delay=max_delay, clock=self.clock
        )
        self.put_count = 0
        self.waiting: list[QueuedItem[int]] = []
        self.known: list[QueuedItem[int]] = []
        self.left: Counter[int] = Counter()
        self.closed = False

    @rule(timeout=TICKS)
    def put(self, timeout: float) -> None:
        deadline = self.clock.now + timeout
        if self.closed:
            with pytest.raises(EngineUnavailable):
                self.queue.put(-1, deadline=deadline)
        elif len(self.waiting) == self.capacity:
            with pytest.raises(QueueFull, match=str(self.capacity)):
                self.queue.put(-1, deadline=deadline)
        else:
            entry = self.queue.put(self.put_count, deadline=deadline)
            assert entry.item == self.put_count
            assert entry.arrived == self.clock.now
            self.put_count += 1
            self.waiting.append(entry)
            self.known.append(entry)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.known))
        was_waiting = entry in self.waiting
        self.queue.cancel(entry)
        if was_waiting:
            self.leave([entry])

    @rule(seconds=TICKS)
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def poll(self) -> None:
        self.polled()

    def polled(self) -> Poll[int]:
        """Expect the oldest entries in time, and that the expired ones before them are gone."""
        now = self.clock.now
        poll = self.queue.poll(self.max_batch)
        self.expire()
        if not self.waiting:
            assert poll == Poll()
            return poll
        release_at = self.waiting[0].arrived + self.max_delay
        full = len(self.waiting) >= self.max_batch
        if self.max_delay and not full and now < release_at:
            assert poll == Poll(wait=release_at - now)
            return poll
        batch: list[QueuedItem[int]] = []
        while self.waiting and len(batch) < self.max_batch:
            batch.append(self.waiting[0])
            self.leave(batch[-1:], launched=True)
            self.expire()
        assert poll == Poll(batch, "full" if full else "delay" if self.max_delay else "idle")
        return poll

    @rule()
    def poll_when_told_to(self) -> None:
        """Check that `wait` ends on time."""
        poll = self.polled()
        if poll.wait is not None:
            self.clock.now += poll.wait / 2
            assert self.polled().batch == []
            self.clock.now += poll.wait / 2
            self.polled()

    def expire(self) -> None:
        while self.waiting and self.waiting[0].deadline <= self.clock.now:
            self.leave(self.waiting[:1])

    @rule()
    def close(self) -> None:
        self.queue.close()
        self.leave(self.waiting)
        self.closed = True

    def leave(self, entries: list[QueuedItem[int]], *, launched: bool = False) -> None:
        for entry in list(entries):
            assert entry.launched is launched
            self.left[entry.item] += 1
            self.waiting.remove(entry)

    @invariant()
    def every_item_leaves_once(self) -> None:
        assert all(count == 1 for count in self.left.values())
        assert len(self.left) + len(self.waiting) == self.put_count
        assert not any(entry.launched for entry in self.waiting)

    @invariant()
    def length_counts_waiting_entries(self) -> None:
        assert len(self.queue) == len(self.waiting) <= self.capacity


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrderOfOperations = QueueMachine.TestCase


class CountedDeadline(float):
    """A deadline that counts how often it is compared."""

    looks = 0

    def __gt__(self, other: float) -> bool:
        CountedDeadline.looks += 1
        return super().__gt__(other)


@pytest.mark.parametrize("max_delay", [0.0, 5.0], ids=["launched", "held back"])
def test_a_poll_looks_at_one_batch(max_delay: float) -> None:
    waiting, clock = queue(capacity=10_000, max_delay=max_delay)
    for number in range(1000):
        waiting.put(str(number), deadline=CountedDeadline(clock.now + 10))
    CountedDeadline.looks = 0
    poll = waiting.poll(4 if max_delay == 0 else 2000)
    assert len(poll.batch) == (4 if max_delay == 0 else 0)
    assert 0 < CountedDeadline.looks <= 5


def test_polls_look_once_at_an_expired_entry() -> None:
    waiting, clock = queue(capacity=10_000)
    for number in range(1000):
        waiting.put(str(number), deadline=CountedDeadline(clock.now + 1))
    waiting.put("in time", deadline=CountedDeadline(clock.now + 10))
    clock.now += 1
    CountedDeadline.looks = 0
    assert items(waiting.poll(4).batch) == ["in time"]
    assert waiting.poll(4).batch == []
    assert CountedDeadline.looks == 1001
