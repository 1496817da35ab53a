"""The batch queue: a bounded first-in first-out data structure with a clock.

It knows no thread, no event loop and no model; whoever owns it (an engine) brings the lock, and asks:

    put(item)  ->  entry          web side: one image enters, or QueueFull
    cancel(entry)                 web side: its caller went away, or its time is up
    poll()     ->  Poll           engine side, whenever the device is free: a batch to launch now,
                                  or how long to wait; and who expired meanwhile
    close()                       no more entries; what waits is handed back

A batch is formed at `poll`, never earlier: an image that is cancelled or expires up to that moment is
not launched. With no delay set, whatever waits is launched (`idle`). With a delay, an incomplete batch
is held back until its oldest entry is that old, counted from that entry's arrival and not from the
poll that first saw it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from service.engine.messages import Release
from service.errors import EngineUnavailable, QueueFull

T = TypeVar("T")


class State(enum.Enum):
    """Where an entry stands. Every entry leaves `WAITING` exactly once."""

    WAITING = "waiting"
    LAUNCHED = "launched"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    RETURNED = "returned"


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One item's stay in the queue.

    Attributes:
        item: what was put.
        arrived: clock reading at `put`, seconds.
        deadline: clock reading from which it is never launched.
        state: see `State`.
    """

    item: T
    arrived: float
    deadline: float
    state: State = State.WAITING


@dataclass(slots=True)
class Poll(Generic[T]):
    """What the engine should do now.

    Attributes:
        batch: entries to launch together, oldest first; empty when there is nothing to launch yet.
        release: why the batch was formed; meaningless when it is empty.
        expired: entries whose time was up; they are out of the queue and need an answer.
        wait: seconds until a poll can give something new without a `put`; None when only a `put` can.
    """

    batch: list[Entry[T]] = field(default_factory=list)
    release: Release = "idle"
    expired: list[Entry[T]] = field(default_factory=list)
    wait: float | None = None


class BatchQueue(Generic[T]):
    """Bounded FIFO with deadlines, cancellation and batch formation. Not thread-safe by itself.

    Args:
        capacity: entries waiting at most.
        max_batch: entries in one batch at most.
        max_delay: seconds an incomplete batch is held back; 0 never holds.
        clock: monotonic seconds.
    """

    def __init__(self, *, capacity: int, max_batch: int, max_delay: float, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        self._max_batch = max_batch
        self._max_delay = max_delay
        self._clock = clock
        self._entries: deque[Entry[T]] = deque()
        self._waiting = 0
        self._closed = False

    def __len__(self) -> int:
        """Entries waiting; cancelled ones do not count, though they may still lie in the deque."""
        return self._waiting

    def put(self, item: T, *, deadline: float) -> Entry[T]:
        """Add an item at the end.

        Raises:
            QueueFull: `capacity` entries are waiting.
            EngineUnavailable: the queue is closed.
        """
        if self._closed:
            raise EngineUnavailable("the engine is closed")
        if self._waiting >= self._capacity:
            raise QueueFull(f"all {self._capacity} places in the queue are taken")
        entry = Entry(item, self._clock(), deadline)
        self._entries.append(entry)
        self._waiting += 1
        return entry

    def cancel(self, entry: Entry[T]) -> bool:
        """Take an entry out. False if it left already: launched, expired, or cancelled before."""
        if entry.state is not State.WAITING:
            return False
        self._leave(entry, State.CANCELLED)
        # It stays in the deque until it comes to the front; a queue of nothing else must not grow.
        if len(self._entries) > 2 * self._waiting + self._max_batch:
            self._entries = deque(e for e in self._entries if e.state is State.WAITING)
        return True

    def poll(self) -> Poll[T]:
        """Form the batch that should be launched now, if any."""
        now = self._clock()
        result: Poll[T] = Poll()
        self._expire(now, result.expired)
        if not self._waiting:
            return result
        full = self._waiting >= self._max_batch
        if self._max_delay > 0 and not full and not self._closed:
            release_at = self._entries[0].arrived + self._max_delay
            if now < release_at:
                # An earlier deadline wakes the engine too, so that an expired entry is answered in time.
                result.wait = min(release_at, *(e.deadline for e in self._live())) - now
                return result
        result.release = "full" if full else "delay" if self._max_delay > 0 else "idle"
        while self._entries and len(result.batch) < self._max_batch:
            entry = self._entries.popleft()
            if entry.state is State.WAITING:
                self._leave(entry, State.LAUNCHED)
                result.batch.append(entry)
        return result

    def close(self) -> list[Entry[T]]:
        """Refuse further entries and hand back those that wait, oldest first."""
        self._closed = True
        returned = self._live()
        for entry in returned:
            self._leave(entry, State.RETURNED)
        self._entries.clear()
        return returned

    def _expire(self, now: float, expired: list[Entry[T]]) -> None:
        for entry in self._live():
            if entry.deadline <= now:
                self._leave(entry, State.EXPIRED)
                expired.append(entry)
        while self._entries and self._entries[0].state is not State.WAITING:
            self._entries.popleft()

    def _live(self) -> list[Entry[T]]:
        return [entry for entry in self._entries if entry.state is State.WAITING]

    def _leave(self, entry: Entry[T], state: State) -> None:
        entry.state = state
        self._waiting -= 1
