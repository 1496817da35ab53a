"""The batch queue against a model of it, with a clock that only the tests move."""

from collections import Counter
from collections.abc import Hashable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service.engine.batching import BatchQueue, Entry, Poll
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

    `waiting` is what must be in the queue, oldest first, and `turns` are its callers, the next
    first; every item must leave it exactly once.
    """

    @initialize(
        capacity=st.integers(1, 12),
        max_batch=st.integers(1, 9),
        max_delay=st.sampled_from([0.0, 0.5, 2.0]),
    )
    def build(self, capacity: int, max_batch: int, max_delay: float) -> None:
        self.capacity, self.max_batch, self.max_delay = capacity, max_batch, max_delay
        self.clock = Clock()
        self.queue: BatchQueue[int] = BatchQueue(
            capacity=capacity, max_delay=max_delay, clock=self.clock
        )
        self.put_count = 0
        self.waiting: list[Entry[int]] = []
        self.turns: list[Hashable] = []
        self.last_caller, self.shared_until = "", 0.0
        self.known: list[Entry[int]] = []
        self.left: Counter[int] = Counter()
        self.closed = False

    @rule(timeout=TICKS, caller=st.sampled_from("abc"))
    def put(self, timeout: float, caller: str) -> None:
        if self.closed:
            with pytest.raises(EngineUnavailable):
                self.queue.put(-1, deadline=self.clock.now + timeout)
        elif len(self.waiting) == self.capacity:
            with pytest.raises(QueueFull, match=str(self.capacity)):
                self.queue.put(-1, deadline=self.clock.now + timeout)
        else:
            entry = self.queue.put(self.put_count, deadline=self.clock.now + timeout, caller=caller)
            if caller != self.last_caller:
                self.last_caller, self.shared_until = (
                    caller,
                    self.clock.now + bool(self.last_caller),
                )
            assert entry.item == self.put_count
            assert entry.arrived == self.clock.now
            self.put_count += 1
            self.waiting.append(entry)
            self.known.append(entry)
            self.turns += [caller] if caller not in self.turns else []

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
        """Each caller has one of its entries in turn, oldest first; those that are too late are
        taken out.

        One of several has a quarter of a batch at most, of a small one for a second more; with a
        delay it has all.
        """
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
        batch: list[Entry[int]] = []
        is_alone = len(self.turns) == 1 and (self.max_batch > 8 or now >= self.shared_until)
        most = self.max_batch if is_alone or self.max_delay else max(1, self.max_batch // 4)
        taken: Counter[Hashable] = Counter()
        while self.waiting and len(batch) < self.max_batch and taken[self.turns[0]] < most:
            taken[self.turns[0]] += 1
            batch.append(self.of_caller(self.turns[0])[0])
            self.turns.append(self.turns.pop(0))
            self.leave(batch[-1:], launched=True)
            self.expire()
        assert poll == Poll(batch, "full" if full else "delay" if self.max_delay else "idle")
        return poll

    @rule()
    def poll_when_told_to(self) -> None:
        """`wait` is neither too early nor too late."""
        poll = self.polled()
        if poll.wait is not None:
            self.clock.now += poll.wait / 2
            assert self.polled().batch == []
            self.clock.now += poll.wait / 2
            self.polled()

    def of_caller(self, caller: Hashable) -> list[Entry[int]]:
        return [entry for entry in self.waiting if entry.caller == caller]

    def expire(self) -> None:
        """Expect that what expired was taken out before the first entry in time."""
        while self.turns and (own := self.of_caller(self.turns[0]))[0].deadline <= self.clock.now:
            self.leave(own[:1])

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
            if not self.of_caller(entry.caller):
                self.turns = [caller for caller in self.turns if caller != entry.caller]

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
            assert [entry for own in self.queue._turns.values() for entry in own] == [
                entry for caller in self.turns for entry in self.of_caller(caller)
            ]


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrderOfOperations = QueueMachine.TestCase


class CountedDeadline(float):
    """A deadline that counts how often it is looked at."""

    looks = 0

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
