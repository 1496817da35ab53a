"""The batch queue: first in, first out, bounded, with deadlines and a clock.

It knows no thread, event loop or model. Its owner, an engine, brings the lock, and calls:

    put(item)        ->  entry    web side: one image enters, or QueueFull
    cancel(entry)                 web side: its client disconnected, or its time is up
    poll(max_batch)  ->  Poll     engine side, when the device is free: a batch to launch now,
                                  or how long to wait
    close()                       accept no more entries, and drop the waiting ones

`poll` forms the batch, so it launches no image that was cancelled or expired before. Without a
delay it launches all waiting images at once, up to the largest batch (`idle`). With a delay, the
queue holds an incomplete batch until its oldest entry has waited that long.

The queue does not answer entries. Its owner keeps a timer for each entry, because the engine may be
busy when a deadline passes, and cancels the entry when the timer fires. The work of `poll` does not
grow with the queue: it looks at the entries that it takes out, and at the next one.

The queue does not know callers. They take turns where work is admitted: see
docs/decisions/fairness.md.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from service.engine.messages import Release
from service.errors import EngineUnavailable, QueueFull

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class QueuedItem(Generic[T]):
    """One item's stay in the queue.

    Attributes:
        arrived: the clock's reading at `put`.
        deadline: the clock's reading from which the item is never launched.
        launched: whether a poll took it into a batch.
    """

    item: T
    arrived: float
    deadline: float
    launched: bool = False


@dataclass(slots=True)
class Poll(Generic[T]):
    """The queue's instruction to the engine at one moment.

    Attributes:
        batch: entries to launch together, oldest first; empty if it is too early.
        release: why the batch was formed; meaningless if the batch is empty.
        wait: seconds until a poll can return a batch; None if that needs another `put`.
    """

    batch: list[QueuedItem[T]] = field(default_factory=list)
    release: Release = "idle"
    wait: float | None = None


class BatchQueue(Generic[T]):
    """A bounded FIFO that forms batches. Not thread-safe by itself.

    An expired entry counts as waiting until it is cancelled or a poll takes it out.

    Args:
        capacity: largest number of waiting entries.
        max_delay: seconds that an incomplete batch is held back; 0 never holds.
        clock: monotonic seconds.
    """

    def __init__(self, *, capacity: int, max_delay: float, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        self._max_delay = max_delay
        self._clock = clock
        # Ordered by arrival; removes the first entry, or any other, in constant time.
        self._entries: OrderedDict[QueuedItem[T], None] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        """Return the number of waiting entries."""
        return len(self._entries)

    def put(self, item: T, *, deadline: float) -> QueuedItem[T]:
        """Add an item at the end.

        Raises:
            QueueFull: `capacity` entries are waiting.
            EngineUnavailable: the queue is closed.
        """
        if self._closed:
            raise EngineUnavailable("the engine is closed")
        if len(self._entries) >= self._capacity:
            raise QueueFull(f"all {self._capacity} slots in the queue are taken; try again")
        entry = QueuedItem(item, self._clock(), deadline)
        self._entries[entry] = None
        return entry

    def cancel(self, entry: QueuedItem[T]) -> None:
        """Take an entry out; no effect once it has left, or if it is in another queue."""
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
        release: Release = "delay" if self._max_delay else "idle"
        poll: Poll[T] = Poll(release="full" if full else release)
        while oldest is not None and len(poll.batch) < max_batch:
            del self._entries[oldest]
            oldest.launched = True
            poll.batch.append(oldest)
            oldest = self._oldest_in_time(now)
        return poll

    def close(self) -> None:
        """Refuse new entries, and drop the waiting ones."""
        self._closed = True
        self._entries.clear()

    def _oldest_in_time(self, now: float) -> QueuedItem[T] | None:
        """Take out the expired entries at the front, and return the first one in time."""
        while self._entries:
            oldest = next(iter(self._entries))
            if oldest.deadline > now:
                return oldest
            del self._entries[oldest]
        return None
