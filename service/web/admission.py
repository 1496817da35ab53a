"""Admission: bounds on what requests take of a process, from the head to the answer.

    the head is here        a place must be free, but the request takes none yet; slow callers keep nobody out
    the body arrives        its bytes are counted until the request is answered; bodies that crawl give way
    the body is here        the request takes a place for each image, and releases it with the answer or the error;
                            one caller leaves some to others
    the answer is sent      bytes that its caller does not read count like those of bodies; the slowest reader gives way
    there is no room        it is refused at once, or after a second or two where refusals themselves are too many

A body crawls when it arrives more slowly than `MIN_BODY_RATE`. All of it belongs to one event loop.
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
from service.http import AnswerRoom, Connection

MIN_BODY_RATE: Final = 4096
"""Bytes a second below which a body crawls."""

GRACE_SECONDS: Final = 1.0
"""Seconds by which a body may be behind its rate before it crawls.

A burst of bytes earns no more than that either.
"""

PROMISE_SECONDS: Final = 0.1
"""Age up to which a body is expected to be here soon, and to take a place."""

LONGEST_WAIT: Final = 1.0
"""Seconds that a refusal waits at most, of a caller that keeps to it: the least that `Retry-After`
says.
"""

RECEIVING_BYTES: Final = 512 << 20
"""Bytes of all bodies of a service that are not answered yet, and of all unsent answers: of 4,000
photographs.
"""

_SHARE: Final = 7
"""Places that a caller may hold for each one that is still free then: 224 of 256, of what is left
the next one 28.
"""

_LEAST_SHARED: Final = 8
"""Places below which callers do not share them."""

_REFUSALS_A_SECOND: Final = 500
"""Refusals that go out at once: a tenth of a core."""


class Limiter:
    """Counts the places for images: `in_use` of `capacity`; a quarter of them, at most, for who
    waits for a model.

    A caller that holds some takes no more than leaves others theirs: who sends hundreds of pictures
    at once would keep everybody else out until they are decoded.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_use = 0
        self._waiting = 0
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Take a place while a model is loaded; raises `ModelLoading` if too many do, and
        `QueueFull`.
        """
        if self._waiting >= max(1, self.capacity // 4):
            raise ModelLoading(
                f"the model is being loaded, and {self._waiting} requests wait for theirs"
            )
        with self.permit():
            self._waiting += 1
            try:
                yield
            finally:
                self._waiting -= 1

    def check(self, count: int = 1, caller: str = "") -> None:
        """Raise `QueueFull` unless `count` places are free, for a caller if one is given."""
        if self.in_use + count > self.capacity:
            raise QueueFull(f"all {self.capacity} places in the service are taken")
        if not self._leaves_some(count, caller):
            raise QueueFull(
                f"requests of this caller have {self._held[caller]} of {self.capacity} places; others need the rest"
            )

    async def settle(self, count: int = 1, caller: str = "") -> None:
        """Wait for the loop's next turn unless `count` places are free: a batch that has just come
        lends some then.
        """
        if self.in_use + count > self.capacity or not self._leaves_some(count, caller):
            await asyncio.sleep(0)

    def permit(self, caller: str = "") -> "Permit":
        """Take one place, and return the permit that holds it; raises `QueueFull` if none is free."""
        permit = Permit(self, caller)
        permit.extend()
        return permit

    def take(self, count: int, caller: str) -> None:
        """Count places of a caller, or count them no more if `count` is negative."""
        self.in_use += count
        if caller:
            self._held[caller] += count
            if not self._held[caller]:
                del self._held[caller]

    def _leaves_some(self, count: int, caller: str) -> bool:
        held = self._held[caller] if caller else 0
        return (
            not held
            or self.capacity < _LEAST_SHARED
            or held + count <= _SHARE * (self.capacity - self.in_use - count)
        )


class Permit:
    """The places of one request of a caller, "" for nobody; a context manager that releases them."""

    def __init__(self, limiter: Limiter, caller: str = "") -> None:
        self._limiter = limiter
        self._caller = caller
        self._held = self._lent = 0

    def extend(self, count: int = 1) -> None:
        """Take `count` places more, or none; raises `QueueFull` if fewer are free for this caller."""
        self._limiter.check(count, self._caller)
        self._limiter.take(count, self._caller)
        self._held += count

    @contextlib.contextmanager
    def lent(self, keep: int = 0) -> Iterator[None]:
        """Lend a place to others until the context ends, while its work waits; then take it, even
        if none is free.

        None is lent if so few are held that only `keep` would be left.
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
        """Release one of the places."""
        self._limiter.take(-1, self._caller)
        self._held -= 1

    def close(self) -> None:
        """Release all places."""
        self._limiter.take(-self._held, self._caller)
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Body:
    """A request's body.

    Attributes:
        size: bytes of it that are counted.
        gave_way: whether it was ended because others needed its room.
        began: reading of the clock when it was first expected.
        paid_until: reading of the clock until which its bytes are fast enough; after it the body
        crawls.
        end: ends it soon; while it arrives.
    """

    end: Callable[[], None]

    def __init__(self) -> None:
        self.size = 0
        self.gave_way = False
        self.began = self.paid_until = 0.0


class Reader(Protocol):
    """A connection whose caller does not keep up with its answer."""

    @property
    def unsent_bytes(self) -> int:
        """Return the number of bytes that wait in this process; it only falls while the reader is
        slow.
        """

    def give_way(self) -> None:
        """Drop the unsent bytes at once."""


@dataclass(slots=True)
class _Reading:
    """What a reader had left to read at its begin, and when last looked at."""

    began: float
    first_bytes: int
    unsent_bytes: int


class Receiving(AnswerRoom):
    """The bytes that callers make a process keep: `in_use` of bodies without an answer yet, and
    unsent ones of answers.

    Args:
        capacity: bytes that bodies and unsent answers may have together.
        clock: gives monotonic seconds.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.in_use = 0
        self._clock = clock
        self._arriving: dict[Body, None] = {}
        self._readers: dict[Reader, _Reading] = {}
        self._unsent = 0  # the sum over `_readers` when last looked at, so never too small

    @contextlib.contextmanager
    def arriving(self, body: Body, end: Callable[[], None]) -> Iterator[None]:
        """Let a body arrive while the context lasts; `end` is called if it gives way, and must end
        it soon.
        """
        body.end, body.began = end, self._clock()
        body.paid_until = body.began + GRACE_SECONDS
        self._arriving[body] = None
        try:
            yield
        finally:
            self._arriving.pop(body, None)
            del body.end  # it holds the request, which holds the body

    def newcomers(self, most: int) -> int:
        """Return how many bodies began to arrive less than `PROMISE_SECONDS` ago, at most `most`."""
        since = self._clock() - PROMISE_SECONDS
        recent = takewhile(lambda body: body.began >= since, reversed(self._arriving))
        return sum(1 for _ in islice(recent, most))

    def add(self, body: Body, count: int) -> None:
        """Count bytes that arrived.

        Bodies that crawl give way, then slow readers. Raises `ReceivingFull` if there is still no
        room.
        """
        now = self._clock()
        body.paid_until = min(body.paid_until + count / MIN_BODY_RATE, now + GRACE_SECONDS)
        while self._is_short_of(count):
            crawling = [other for other in self._arriving if other.paid_until < now and other.size]
            slowest = max(
                (other for other in crawling if other is not body),
                key=lambda other: other.size,
                default=None,
            )
            if slowest is None and self._end_slowest_reader():
                continue
            if slowest is None:
                raise ReceivingFull(f"{self.capacity} bytes of pictures are being received already")
            del self._arriving[slowest]
            slowest.gave_way = True
            self.give_back(slowest)
            slowest.end()
        self.in_use += count
        body.size += count

    def give_back(self, body: Body) -> None:
        """Count the bytes of a body no more: its request is answered."""
        self.in_use -= body.size
        body.size = 0

    def add_reader(self, connection: Reader) -> None:
        """Count the unsent bytes of a connection; if there is no room for them, end slow readers,
        else this one.
        """
        unsent_bytes = connection.unsent_bytes
        self._readers[connection] = _Reading(self._clock(), unsent_bytes, unsent_bytes)
        self._unsent += unsent_bytes
        while self._is_short_of(0) and connection in self._readers:
            if not self._end_slowest_reader():
                self._end_reader(connection)

    def remove_reader(self, connection: Reader) -> None:
        """Stop counting the unsent bytes of a connection. No effect if they are not counted."""
        reading = self._readers.pop(connection, None)
        if reading is not None:
            self._unsent -= reading.unsent_bytes

    def _is_short_of(self, count: int) -> bool:
        """Return whether there is no room for `count` bytes; looks at the readers only when room is
        short.
        """
        if self.in_use + self._unsent + count <= self.capacity:
            return False
        for reader, reading in self._readers.items():
            reading.unsent_bytes = reader.unsent_bytes
        self._unsent = sum(reading.unsent_bytes for reading in self._readers.values())
        return self.in_use + self._unsent + count > self.capacity

    def _end_slowest_reader(self) -> bool:
        """End the reader of the lowest rate, if any has had the time to show one; return whether
        there was one.
        """
        now = self._clock()
        known = {
            reader: reading
            for reader, reading in self._readers.items()
            if now - reading.began >= GRACE_SECONDS
        }

        def bytes_a_second(reader: Reader) -> float:
            reading = known[reader]
            return (reading.first_bytes - reading.unsent_bytes) / (now - reading.began)

        slowest = min(known, key=bytes_a_second, default=None)
        if slowest is None:
            return False
        self._end_reader(slowest)
        return True

    def _end_reader(self, reader: Reader) -> None:
        """Stop counting a reader, and close its connection."""
        self.remove_reader(reader)
        reader.give_way()


class RefusalPace:
    """Delays refusals of callers that come back at once, against their `Retry-After`.

    A refusal costs 0.2 ms, and the picture that is read and discarded as much again. A hundred
    callers who come back at once would take the core that answers others. So a caller that comes
    back within a second on its connection waits for two, and everyone beyond `most` refusals a
    second for one. `clock` gives monotonic seconds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, most: float = _REFUSALS_A_SECOND
    ) -> None:
        self._clock = clock
        self._most = self._credit = most
        self._counted_at = clock()

    def delay(self, connection: Connection | None) -> float:
        """Return the seconds for which a refusal on this connection is to wait."""
        now = self._clock()
        earned = (now - self._counted_at) * self._most
        self._credit, self._counted_at = min(self._most, self._credit + earned), now
        comes_back = connection is not None and now - connection.refused_at < LONGEST_WAIT
        delay = 2 * LONGEST_WAIT if comes_back else LONGEST_WAIT if self._credit < 1 else 0.0
        if not delay:
            self._credit -= 1
        if connection is not None:
            connection.refused_at = now + delay
        return delay
