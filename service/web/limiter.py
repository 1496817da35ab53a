"""Limits of a process: the slots and the bytes that requests may take.

    request headers are here    a slot must be free, but the request does not take it yet
    the body arrives            its bytes are counted until the answer; slow bodies give way
    the body is here            the request takes a slot for each picture, until it is answered
    the answer is sent          unread bytes are counted; the slowest reader gives way
    a limit is reached          the request is refused at once

With 8 slots:

    0.0 s    A sends 7 pictures in a batch, which take 7 slots
    0.1 s    A sends another picture: refused, because the last slot is for other callers
    0.2 s    B sends a picture, which takes the last slot
    0.3 s    C sends a picture: refused, because every slot is taken
    0.4 s    a picture of A is answered, and gives its slot back
    0.5 s    C sends its picture again, which takes that slot

A body is slow when it arrives below `MIN_BODY_RATE`. Every object belongs to one event loop.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Final, Protocol, Self

from service.errors import ModelLoading, QueueFull, ReceivingFull
from service.http.application import AnswerRoom

MIN_BODY_RATE: Final = 4096
"""Bytes a second below which a body is slow."""

GRACE_SECONDS: Final = 1.0
"""A body may lag its rate by this many seconds; a burst pays for at most as many in advance."""

PROMISE_SECONDS: Final = 0.1
"""A body younger than this counts as a request that will soon take a slot."""

RECEIVING_BYTES: Final = 512 << 20
"""Bytes of unanswered bodies and unsent answers in a service: 4,000 photographs."""

_SHARE: Final = 7
"""Slots that a caller may hold for each free slot.

Of 256 slots, the first caller gets 224, and the second one 28 of the other 32.
"""

_LEAST_SHARED: Final = 8
"""Capacity below which callers do not share the slots."""

_UNREAD_SHARE: Final = 4
"""A caller's unread answers may take a quarter of the room for bodies and answers."""


class Limiter:
    """Counts the slots for pictures.

    A caller that holds slots cannot take the last free ones. Otherwise a caller with hundreds of
    pictures would keep all other callers out until its pictures are decoded.

    Attributes:
        capacity: number of slots.
        in_use: number of slots that requests hold.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_use = 0
        self._waiting: Counter[str] = Counter()
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def waiting(self, caller: str) -> Iterator[None]:
        """Hold a slot while a model is loaded; waiting requests hold at most a quarter of all.

        The slot does not count for its caller, because callers share that quarter separately.

        Raises:
            ModelLoading: that quarter is taken, or the rest of it is for other callers.
            QueueFull: every slot is taken.
        """
        most = max(1, self.capacity // 4)
        waiting = self._waiting.total()
        if waiting >= most or not _leaves_some(self._waiting[caller], 1, most, waiting):
            raise ModelLoading(f"the model is being loaded, and {waiting} requests wait for models")
        with self.permit():
            self._waiting[caller] += 1
            try:
                yield
            finally:
                self._waiting[caller] -= 1
                self._waiting = +self._waiting  # drop callers without waiting requests

    def check(self, count: int = 1, caller: str = "") -> None:
        """Raise `QueueFull` unless `count` slots are free, and the caller may take them."""
        if self.in_use + count > self.capacity:
            raise QueueFull(f"all {self.capacity} slots of the service are taken")
        if not self._leaves_some(count, caller):
            raise QueueFull(
                f"this caller holds {self._held[caller]} of {self.capacity} slots; "
                "the rest is for other callers"
            )

    async def wait_for_lenders(self, count: int = 1, caller: str = "") -> None:
        """Let other tasks run once if `count` slots are not free.

        The tasks of a batch that has just arrived lend its slots then.
        """
        if self.in_use + count > self.capacity or not self._leaves_some(count, caller):
            await asyncio.sleep(0)

    def permit(self) -> "Permit":
        """Take one slot and return its permit; raises `QueueFull` if no slot is free."""
        permit = Permit(self)
        permit.extend()
        return permit

    def take(self, count: int, caller: str) -> None:
        """Count slots of a caller; a negative count gives slots back."""
        self.in_use += count
        if caller:
            self._held[caller] += count
            if not self._held[caller]:
                del self._held[caller]

    def _leaves_some(self, count: int, caller: str) -> bool:
        return _leaves_some(self._held[caller], count, self.capacity, self.in_use)


def _leaves_some(held: int, count: int, capacity: int, in_use: int) -> bool:
    """Return whether a caller that takes `count` more slots leaves some to others."""
    if not held or capacity < _LEAST_SHARED:
        return True
    return held + count <= _SHARE * (capacity - in_use - count)


class Permit:
    """The slots of one request; the end of its context gives them back.

    Args:
        caller: holds the slots; empty if they count for no caller.
    """

    def __init__(self, limiter: Limiter, caller: str = "") -> None:
        self._limiter = limiter
        self._caller = caller
        self._held = 0
        self._lent = 0

    def check(self, count: int) -> None:
        """Raise `QueueFull` unless the request may take `count` more slots."""
        self._limiter.check(count, self._caller)

    def extend(self, count: int = 1) -> None:
        """Take `count` more slots, or none of them; raises as `check`."""
        self.check(count)
        self._limiter.take(count, self._caller)
        self._held += count

    @contextlib.contextmanager
    def lent(self, keep: int = 0) -> Iterator[None]:
        """Lend a slot to other requests while work of this request waits in a lane.

        Otherwise a batch as large as the queue would keep all other callers out until its last
        picture is decoded. The lane bounds the waiting work by its deadline instead. At the end the
        slot is taken back, even if all are in use.

        Args:
            keep: number of slots that are not lent.
        """
        lent = int(self._held - self._lent > keep)
        self._lent += lent
        self._limiter.take(-lent, self._caller)
        try:
            yield
        finally:
            self._lent -= lent
            self._limiter.take(lent, self._caller)

    def release(self) -> None:
        """Give one slot back."""
        self._limiter.take(-1, self._caller)
        self._held -= 1

    def close(self) -> None:
        """Give all slots back."""
        self._limiter.take(-self._held, self._caller)
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CountedBytes:
    """The counted bytes of a request's body.

    Args:
        caller: sends the body.

    Attributes:
        size: number of counted bytes.
        began: reading of the clock when the body began to arrive.
        paid_until: reading of the clock after which the body is slow, unless more bytes arrive.
        end: ends the arriving body soon.
    """

    end: Callable[[], None]

    def __init__(self, caller: str = "") -> None:
        self.caller = caller
        self.size = 0
        self.began = 0.0
        self.paid_until = 0.0


class Reader(Protocol):
    """A connection whose caller reads its answer more slowly than it is sent."""

    caller: str

    @property
    def unsent_bytes(self) -> int:
        """Return the number of unsent bytes. It never rises while the reader is slow."""

    def give_way(self) -> None:
        """Drop the unsent bytes at once."""


@dataclass(slots=True)
class _Reading:
    """The progress of a reader.

    Attributes:
        began: reading of the clock when the reader became slow.
        first_bytes: number of unsent bytes then.
        unsent_bytes: number of unsent bytes when last looked at.
    """

    began: float
    first_bytes: int
    unsent_bytes: int


class ByteBudget(AnswerRoom):
    """Counts the bytes that callers make a process keep: bodies and unsent answers.

    Args:
        capacity: number of bytes that bodies and unsent answers may have together.
        clock: monotonic seconds.

    Attributes:
        in_use: number of bytes of unanswered bodies.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.in_use = 0
        self._clock = clock
        self._arriving: dict[CountedBytes, None] = {}
        self._readers: dict[Reader, _Reading] = {}
        self._unsent = 0  # the sum over `_readers` when last looked at, so never too small

    @contextlib.contextmanager
    def arriving(self, body: CountedBytes, end: Callable[[], None]) -> Iterator[None]:
        """Track a body that arrives.

        Args:
            end: called when the body has to give way to others; must end it soon.
        """
        body.end = end
        body.began = self._clock()
        body.paid_until = body.began + GRACE_SECONDS
        self._arriving[body] = None
        try:
            yield
        finally:
            self._arriving.pop(body, None)
            del body.end  # it holds the request, which holds the body

    def newcomers(self, most: int) -> int:
        """Return how many bodies began to arrive within `PROMISE_SECONDS`, at most `most`."""
        since = self._clock() - PROMISE_SECONDS
        recent = takewhile(lambda body: body.began >= since, reversed(self._arriving))
        return sum(1 for _ in islice(recent, most))

    def add(self, body: CountedBytes, count: int) -> None:
        """Count bytes that arrived, and end slow bodies and then slow readers to make room.

        Raises:
            ReceivingFull: the room is too small.
        """
        now = self._clock()
        body.paid_until = min(body.paid_until + count / MIN_BODY_RATE, now + GRACE_SECONDS)
        while self._is_short_of(count):
            if not (
                self._end_largest_slow_body(now, body) or self._end_slowest_reader(body.caller)
            ):
                raise ReceivingFull(f"{self.capacity} bytes of pictures are being received already")
        self.in_use += count
        body.size += count

    def give_back(self, body: CountedBytes) -> None:
        """Stop counting the bytes of this body."""
        self.in_use -= body.size
        body.size = 0

    def add_reader(self, connection: Reader) -> None:
        """Count the unsent bytes of a connection, and end slow readers to make room.

        The connection itself is ended if there is not enough room without the others.
        """
        unsent_bytes = connection.unsent_bytes
        self._readers[connection] = _Reading(self._clock(), unsent_bytes, unsent_bytes)
        self._unsent += unsent_bytes
        while self._is_short_of(0) and connection in self._readers:
            if not self._end_slowest_reader(connection.caller):
                self._end_reader(connection)

    def check_unread(self, caller: str) -> None:
        """Raise `ReceivingFull` if the unread answers of a caller exceed its share of the room."""
        unread = sum(reader.unsent_bytes for reader in self._readers if reader.caller == caller)
        if unread > self.capacity // _UNREAD_SHARE:
            raise ReceivingFull(
                f"{unread} bytes of this caller's answers are unread: read them first"
            )

    def remove_reader(self, connection: Reader) -> None:
        """Stop counting the unsent bytes of a connection; no effect if they are not counted."""
        reading = self._readers.pop(connection, None)
        if reading is not None:
            self._unsent -= reading.unsent_bytes

    def _is_short_of(self, count: int) -> bool:
        """Return whether the room is too small for `count` more bytes."""
        if self.in_use + self._unsent + count <= self.capacity:
            return False
        for reader, reading in self._readers.items():
            reading.unsent_bytes = reader.unsent_bytes
        self._unsent = sum(reading.unsent_bytes for reading in self._readers.values())
        return self.in_use + self._unsent + count > self.capacity

    def _end_largest_slow_body(self, now: float, spared: CountedBytes) -> bool:
        """End the largest slow body except `spared`; return whether there was one."""
        slow = [
            body
            for body in self._arriving
            if body is not spared and body.size and body.paid_until < now
        ]
        if not slow:
            return False
        largest = max(slow, key=lambda body: body.size)
        del self._arriving[largest]
        self.give_back(largest)
        largest.end()
        return True

    def _end_slowest_reader(self, newcomer: str) -> bool:
        """End the slowest reader, preferably of the caller with the most unread bytes.

        Readers of that caller are ended at once if another caller needs the room. All others are
        ended only after `GRACE_SECONDS`.

        Returns:
            Whether a reader could be ended.
        """
        now = self._clock()
        unread: Counter[str] = Counter()
        for reader, reading in self._readers.items():
            unread[reader.caller] += reading.unsent_bytes
        largest = max(unread, key=unread.__getitem__, default=newcomer)

        def rank(reader: Reader) -> tuple[bool, float]:
            reading = self._readers[reader]
            seconds = max(now - reading.began, 1e-9)
            rate = (reading.first_bytes - reading.unsent_bytes) / seconds
            return reader.caller != largest, rate

        endable = [
            reader
            for reader, reading in self._readers.items()
            if now - reading.began >= GRACE_SECONDS
            or (reader.caller == largest and largest != newcomer)
        ]
        if not endable:
            return False
        self._end_reader(min(endable, key=rank))
        return True

    def _end_reader(self, reader: Reader) -> None:
        self.remove_reader(reader)
        reader.give_way()
