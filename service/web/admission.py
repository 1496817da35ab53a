"""Admission: a bound on the images that are received, decoded, queued or computed at once.

A permit is taken from the request's head, before its body is read, and released with the answer, the error or the
disconnect. So overload costs a refusal and no work, and memory is bounded.
"""

from __future__ import annotations

from typing import Self

from service.errors import QueueFull


class Limiter:
    """Counts how many of the service's `capacity` places for images are taken. Belongs to one event loop."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_use = 0

    def acquire(self) -> None:
        """Take one place; raises `QueueFull` if none is free."""
        if self.in_use >= self.capacity:
            raise QueueFull(f"all {self.capacity} places in the service are taken")
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

    def extend(self) -> None:
        """Take one place more; raises `QueueFull` if none is free."""
        self._limiter.acquire()
        self._held += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._limiter.release(self._held)
        self._held = 0
