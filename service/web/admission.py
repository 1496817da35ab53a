"""Admission: a bound on the images that are decoded, queued or computed at once.

A request is refused at its head, before its body is read, when no place is free. It takes its places when its body is
here, so that slow callers keep none, and releases them with the answer, the error or the disconnect. Bodies that are
still arriving are bounded by `service.web.receiving`.
"""

from __future__ import annotations

from typing import Self

from service.errors import QueueFull


class Limiter:
    """Counts how many of the service's `capacity` places for images are taken. Belongs to one event loop."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_use = 0

    def check(self, count: int = 1) -> None:
        """Raise `QueueFull` unless `count` places are free."""
        if self.taken + count > self.capacity:
            raise QueueFull(f"all {self.capacity} places in the service are taken")

    @property
    def taken(self) -> int:
        """Return the number of places that are taken."""
        return self.in_use

    def acquire(self) -> None:
        """Take one place; raises `QueueFull` if none is free."""
        self.check()
        self.in_use += 1

    def release(self, count: int = 1) -> None:
        """Give back `count` places."""
        self.in_use -= count

    def permit(self) -> Permit:
        """Take one place, and return the permit that holds it; raises `QueueFull` if none is free."""
        permit = Permit(self)
        permit.extend()
        return permit


class Permit:
    """The places of one request; a context manager that releases them.

    All or none: when `extend` fails, the request fails, and leaving the context releases what it had.
    """

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._held = 0

    def extend(self, count: int = 1) -> None:
        """Take `count` places more; raises `QueueFull` if fewer are free."""
        for _ in range(count):
            self._limiter.acquire()
            self._held += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._limiter.release(self._held)
        self._held = 0
