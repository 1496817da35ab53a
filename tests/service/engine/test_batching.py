"""The batch queue against a model of it, with a clock that only the tests move."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service.engine.batching import BatchQueue, Entry
from service.errors import EngineUnavailable, QueueFull
from tests.service.web.apps import Clock

# Eighths of a second are exact in floating point.
TICKS = st.integers(0, 80).map(lambda n: n / 8)


def queue(*, capacity: int = 100, max_delay: float = 0.0) -> tuple[BatchQueue[str], Clock]:
    clock = Clock()
    return BatchQueue(capacity=capacity, max_delay=max_delay, clock=clock), clock


def items(entries: list[Entry[str]]) -> list[str]:
    return [entry.item for entry in entries]


class QueueMachine(RuleBasedStateMachine):
    """Does anything that web code and an engine may do, in any order.

    `waiting` is what must be in the queue, oldest first; every item must leave it exactly once.
    """

    @initialize(capacity=st.integers(1, 12), max_batch=st.integers(1, 5), max_delay=st.sampled_from([0.0, 0.5, 2.0]))
    def build(self, capacity: int, max_batch: int, max_delay: float) -> None:
        self.capacity, self.max_batch, self.max_delay = capacity, max_batch, max_delay
        self.clock = Clock()
        self.queue: BatchQueue[int] = BatchQueue(capacity=capacity, max_delay=max_delay, clock=self.clock)
        self.put_count = 0
        self.waiting: list[Entry[int]] = []
        self.known: list[Entry[int]] = []
        self.left: Counter[int] = Counter()
        self.closed = False

    @rule(timeout=TICKS)
    def put(self, timeout: float) -> None:
        if self.closed:
            with pytest.raises(EngineUnavailable):
                self.queue.put(-1, deadline=self.clock.now + timeout)
        elif len(self.waiting) == self.capacity:
            with pytest.raises(QueueFull, match=str(self.capacity)):
                self.queue.put(-1, deadline=self.clock.now + timeout)
        else:
            entry = self.queue.put(self.put_count, deadline=self.clock.now + timeout)
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
        now = self.clock.now
        poll = self.queue.poll(self.max_batch)
        self.expire_oldest()
        if not self.waiting:
            assert poll.batch == []
            assert poll.wait is None
            return
        release_at = self.waiting[0].arrived + self.max_delay
        full = len(self.waiting) >= self.max_batch
        if self.max_delay and not full and now < release_at:
            assert poll.batch == []
            assert poll.wait == release_at - now > 0
            return
        assert poll.wait is None
        assert poll.release == ("full" if full else "delay" if self.max_delay else "idle")
        in_time = [entry for entry in self.waiting if entry.deadline > now]
        assert poll.batch == in_time[: self.max_batch] != []
        self.launch(poll.batch)

    @rule()
    def poll_again_when_told_to(self) -> None:
        """`wait` is neither too early nor, unless the oldest expires meanwhile, too late."""
        poll = self.queue.poll(self.max_batch)
        self.expire_oldest()
        self.launch(poll.batch)
        if poll.wait is None:
            return
        oldest = self.waiting[0]
        self.clock.now += poll.wait / 2
        assert self.queue.poll(self.max_batch).batch == []
        self.expire_oldest()
        self.clock.now += poll.wait / 2
        due = self.queue.poll(self.max_batch)
        self.expire_oldest()
        assert (oldest in due.batch) is (oldest.deadline > self.clock.now)
        self.launch(due.batch)

    def expire_oldest(self) -> None:
        """Expect that a poll has taken out what expired before the first entry in time."""
        while self.waiting and self.waiting[0].deadline <= self.clock.now:
            self.leave(self.waiting[:1])

    def launch(self, batch: list[Entry[int]]) -> None:
        assert all(entry.deadline > self.clock.now for entry in batch)
        if batch:  # it took out those that expired between its entries and right behind its last one, too
            overtaken = self.waiting[: self.waiting.index(batch[-1])]
            self.leave([entry for entry in overtaken if entry not in batch])
            self.leave(batch, launched=True)
            self.expire_oldest()

    @rule()
    def close(self) -> None:
        self.queue.close()
        self.leave(self.waiting)
        self.closed = True

    def leave(self, entries: list[Entry[int]], *, launched: bool = False) -> None:
        for entry in list(entries):
            assert entry.launched is launched
            self.left[entry.item] += 1
            self.waiting.remove(entry)

    @invariant()
    def nothing_is_lost_and_nothing_leaves_twice(self) -> None:
        assert all(count == 1 for count in self.left.values())
        assert len(self.left) + len(self.waiting) == self.put_count
        assert not any(entry.launched for entry in self.waiting)

    @invariant()
    def length_counts_those_that_wait(self) -> None:
        assert len(self.queue) == len(self.waiting) <= self.capacity

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            assert list(self.queue._entries) == self.waiting


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrderOfOperations = QueueMachine.TestCase


def test_cancelled_entries_take_no_memory_while_the_engine_is_busy() -> None:
    waiting, clock = queue(capacity=10)
    for _ in range(10_000):
        waiting.cancel(waiting.put("gone", deadline=clock.now + 1))
    assert len(waiting._entries) == 0


class CountedDeadline(float):
    """A deadline that counts how often it is looked at."""

    looks = 0

    def __le__(self, other: float) -> bool:
        CountedDeadline.looks += 1
        return super().__le__(other)

    def __gt__(self, other: float) -> bool:
        CountedDeadline.looks += 1
        return super().__gt__(other)


@pytest.mark.parametrize("max_delay", [0.0, 5.0], ids=["launched", "held back"])
def test_a_poll_looks_at_a_batch_of_entries_however_many_wait(max_delay: float) -> None:
    waiting, clock = queue(capacity=10_000, max_delay=max_delay)
    for number in range(1000):
        waiting.put(str(number), deadline=CountedDeadline(clock.now + 10))
    CountedDeadline.looks = 0
    poll = waiting.poll(4 if max_delay == 0 else 2000)
    assert len(poll.batch) == (4 if max_delay == 0 else 0)
    assert 0 < CountedDeadline.looks <= 5


def test_each_expired_entry_is_looked_at_once() -> None:
    waiting, clock = queue(capacity=10_000)
    for number in range(1000):
        waiting.put(str(number), deadline=CountedDeadline(clock.now + 1))
    waiting.put("in time", deadline=CountedDeadline(clock.now + 10))
    clock.now += 1
    CountedDeadline.looks = 0
    assert items(waiting.poll(4).batch) == ["in time"]
    assert waiting.poll(4).batch == []
    assert CountedDeadline.looks == 1001
