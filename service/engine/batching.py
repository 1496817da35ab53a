"""The batch queue: a bounded data structure with a clock, whose callers take turns.

It knows no thread, no event loop and no model. Its owner, an engine, brings the lock, and calls:

    put(item)        ->  entry    web side: one image enters, or QueueFull
    cancel(entry)                 web side: its caller went away, or its time is up
    poll(max_batch)  ->  Poll     engine side, whenever the device is free: a batch to launch now,
                                  or how long to wait
    close()                       no more entries; what waits is forgotten

A batch is formed at `poll`, never earlier: an image that is cancelled or expires up to that moment
is not launched. Each caller has one of its own entries in turn, oldest first: whoever sends many
delays itself, and not others. Where several callers wait, each has a quarter of a batch at most:
whoever sends one picture waits for a short batch. Where batches are small, as pictures take long,
that is so for a second more: the batch before is short, too. With no delay set, whatever waits is
launched (`idle`). With a delay, batches are to be full: nobody's part is bounded, and an incomplete
batch is held back until its oldest entry is that old, counted from that entry's arrival and not
from the poll that first saw it.

The queue answers nobody. Its owner keeps a timer for each entry, as the engine may be busy when a
deadline passes, and cancels the entry when it fires. `poll` looks only at the entries that it takes
out and at the one behind them, and with a delay at the oldest of each caller, so its work does not
grow with the queue.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from service.engine.messages import Release
from service.errors import EngineUnavailable, QueueFull

T = TypeVar("T")

# A caller beside others has the largest batch divided by this, at most.
_MOST_SHARE: Final = 4
# Images of a batch, up to which it counts as shared until no other caller has come for some
# seconds.
_SMALL_BATCH: Final = 8
_SHARED_SECONDS: Final = 1.0


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One item's stay in the queue.

    Attributes:
        arrived, deadline: the clock's readings at `put`, and from which it is never launched.
        caller: whose turn it takes.
        launched: whether a poll gave it.
    """

    item: T
    arrived: float
    deadline: float
    caller: Hashable = ""
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
    """Bounded queue with turns, deadlines, cancellation and batch formation. Not thread-safe by
    itself.

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
        # Callers in the order of their turns, each with its entries by arrival; none without
        # entries. The first of either, and any other, is taken out in constant time.
        self._turns: OrderedDict[Hashable, OrderedDict[Entry[T], None]] = OrderedDict()
        self._waiting = 0
        self._last_caller: Hashable = None
        self._shared_until = -math.inf
        self._closed = False

    def __len__(self) -> int:
        """Return the number of entries that wait."""
        return self._waiting

    def put(self, item: T, *, deadline: float, caller: Hashable = "") -> Entry[T]:
        """Add an item at the end of its caller's.

        Raises:
            QueueFull: `capacity` entries are waiting.
            EngineUnavailable: the queue is closed.
        """
        if self._closed:
            raise EngineUnavailable("the engine is closed")
        if self._waiting >= self._capacity:
            raise QueueFull(f"all {self._capacity} places in the queue are taken")
        entry = Entry(item, self._clock(), deadline, caller)
        if caller != self._last_caller:
            self._shared_until = (
                -math.inf if self._last_caller is None else entry.arrived + _SHARED_SECONDS
            )
            self._last_caller = caller
        own = self._turns.get(caller)
        if own is None:
            own = self._turns[caller] = OrderedDict()
        own[entry] = None
        self._waiting += 1
        return entry

    def cancel(self, entry: Entry[T]) -> None:
        """Take an entry out if it is here: it may have left already, or wait in another queue."""
        if entry in self._turns.get(entry.caller, ()):
            self._remove(entry)

    def poll(self, max_batch: int) -> Poll[T]:
        """Form the batch of at most `max_batch` entries that should be launched now, if any."""
        now = self._clock()
        first = self._next_in_time(now)
        if first is None:
            return Poll()
        full = self._waiting >= max_batch
        if self._max_delay and not full:
            release_at = (
                min(next(iter(own)).arrived for own in self._turns.values()) + self._max_delay
            )
            if now < release_at:
                return Poll(wait=release_at - now)
        poll: Poll[T] = Poll(release="full" if full else "delay" if self._max_delay > 0 else "idle")
        is_shared = len(self._turns) > 1 or (max_batch <= _SMALL_BATCH and now < self._shared_until)
        most = max(1, max_batch // _MOST_SHARE) if is_shared and not self._max_delay else max_batch
        taken: Counter[Hashable] = Counter()
        while first is not None and len(poll.batch) < max_batch and taken[first.caller] < most:
            taken[first.caller] += 1
            self._remove(first)
            if first.caller in self._turns:
                self._turns.move_to_end(first.caller)
            first.launched = True
            poll.batch.append(first)
            first = self._next_in_time(now)
        return poll

    def close(self) -> None:
        """Refuse further entries, and forget those that wait."""
        self._closed = True
        self._turns.clear()
        self._waiting = 0

    def _next_in_time(self, now: float) -> Entry[T] | None:
        """Return the entry whose turn it is and whose deadline is to come, and take out the expired
        ones before it.
        """
        while self._turns:
            own = next(iter(self._turns.values()))
            oldest = next(iter(own))
            if oldest.deadline > now:
                return oldest
            self._remove(oldest)
        return None

    def _remove(self, entry: Entry[T]) -> None:
        own = self._turns[entry.caller]
        del own[entry]
        self._waiting -= 1
        if not own:
            del self._turns[entry.caller]
