"""Admission: a bound on the images that are received, decoded, queued or computed at once.

With several web workers the bound is over all of them, and the count lies in the memory that they share.

A place is reserved from the request's head, before its body is read, and given back with the answer,
the error or the disconnect. So overload costs a refusal and no work, and memory is bounded.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from service.errors import QueueFull


class Limiter:
    """Counts the places that are taken. Belongs to one event loop.

    Args:
        capacity: images in the service at most.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.taken = 0

    def take(self) -> None:
        """One place.

        Raises:
            QueueFull: none is free.
        """
        if self.taken >= self.capacity:
            raise QueueFull(f"all {self.capacity} places in the service are taken")
        self.taken += 1

    def give_back(self, count: int) -> None:
        """Give back places that are no longer needed."""
        self.taken -= count

    def reserve(self) -> Permit:
        """One place, at once.

        Raises:
            QueueFull: none is free.
        """
        permit = Permit(self)
        permit.extend()
        return permit


class Permit:
    """The places of one request; a context manager that gives them back.

    All or none: when `extend` fails, the request fails, and leaving the context frees what it had.
    """

    def __init__(self, places: Limiter) -> None:
        self._places = places
        self._held = 0

    def extend(self) -> None:
        """One place more.

        Raises:
            QueueFull: none is free.
        """
        self._places.take()
        self._held += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._places.give_back(self._held)
        self._held = 0
