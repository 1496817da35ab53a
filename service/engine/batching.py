"""The batch queue: a bounded first-in first-out data structure with a clock.

It knows no thread, no event loop and no model. Its owner, an engine, brings the lock, and calls:

    put(item)        ->  entry    web side: one image enters, or QueueFull
    cancel(entry)                 web side: its caller went away, or its time is up
    poll(max_batch)  ->  Poll     engine side, whenever the device is free: a batch to launch now,
                                  or how long to wait
    close()                       no more entries; what waits is forgotten

A batch is formed at `poll`, never earlier: an image that is cancelled or expires up to that moment is
not launched. With no delay set, whatever waits is launched (`idle`). With a delay, an incomplete batch
is held back until its oldest entry is that old, counted from that entry's arrival and not from the
poll that first saw it.

The queue answers nobody. Its owner keeps a timer for each entry, as the engine may be busy when a deadline
passes, and cancels the entry when it fires. `poll` looks only at the entries that it takes out and at the
one behind them, so its work grows with the batch and not with the queue.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from service.engine.messages import Release
from service.errors import EngineUnavailable, QueueFull

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One item's stay in the queue.

    Attributes:
        arrived, deadline: the clock's readings at `put`, and from which it is never launched.
        launched: whether a poll gave it.
    """

    item: T
    arrived: float
    deadline: float
    launched: bool = False


@dataclass(slots=True)
class Poll(Generic[T]):
    """The queue's instruction to the engine at one moment.

    Attributes:
        batch: entries to launch together, oldest first; empty when there is nothing to launch yet.
        release: why the batch was formed; meaningless when it is empty.
        wait: seconds until a poll can give a batch without a `put`; None when only a `put` can.
    """

    batch: list[Entry[T]] = field(default_factory=list)
    release: Release = "idle"
    wait: float | None = None


class BatchQueue(Generic[T]):
    """Bounded FIFO with deadlines, cancellation and batch formation. Not thread-safe by itself.

    An expired entry counts as waiting until it is cancelled or a poll takes it out.

    Args:
        capacity: entries waiting at most.
        max_delay: seconds an incomplete batch is held back; 0 never holds.
        clock: monotonic seconds.
    """

    def __init__(self, *, capacity: int, max_delay: float, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        self._max_delay = max_delay
        self._clock = clock
        # Ordered by arrival; both its first entry and any other are taken out in constant time.
        self._entries: OrderedDict[Entry[T], None] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        """Return the number of entries that wait."""
        return len(self._entries)

    def put(self, item: T, *, deadline: float) -> Entry[T]:
        """Add an item at the end.

        Raises:
            QueueFull: `capacity` entries are waiting.
            EngineUnavailable: the queue is closed.
        """
        if self._closed:
            raise EngineUnavailable("the engine is closed")
        if len(self._entries) >= self._capacity:
            raise QueueFull(f"all {self._capacity} places in the queue are taken")
        entry = Entry(item, self._clock(), deadline)
        self._entries[entry] = None
        return entry

    def cancel(self, entry: Entry[T]) -> None:
        """Take an entry out if it is here: it may have left already, or wait in another queue."""
        self._entries.pop(entry, None)

    def poll(self, max_batch: int) -> Poll[T]:
        """Form the batch of at most `max_batch` entries that should be launched now, if any."""
        now = self._clock()
        oldest = self._oldest_in_time(now)
        if oldest is None:
            return Poll()
        full = len(self._entries) >= max_batch
        release_at = oldest.arrived + self._max_delay
        if not full and now < release_at:
            return Poll(wait=release_at - now)
        poll: Poll[T] = Poll(release="full" if full else "delay" if self._max_delay > 0 else "idle")
        while oldest is not None and len(poll.batch) < max_batch:
            del self._entries[oldest]
            oldest.launched = True
            poll.batch.append(oldest)
            oldest = self._oldest_in_time(now)
        return poll

    def close(self) -> None:
        """Refuse further entries, and forget those that wait."""
        self._closed = True
        self._entries.clear()

    def _oldest_in_time(self, now: float) -> Entry[T] | None:
        """Return the oldest entry whose deadline is to come, and take out the expired ones before it."""
        while self._entries:
            oldest = next(iter(self._entries))
            if oldest.deadline > now:
                return oldest
            del self._entries[oldest]
        return None
