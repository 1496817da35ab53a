"""When a request is tried again, and after which pause. Every request of the service may be: none changes anything."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from service.client.errors import ClientError, Unreachable

_LONGEST_PAUSE = 8.0
"""Seconds, unless the service asks for more."""


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a client sends a request that was refused for the moment, or whose connection broke.

    Attributes:
        tries: how often a request is sent at most; 1 never sends one again.
        seconds: from the first try to the beginning of the last. A pause that would end later is not begun.
        first_pause: seconds after the first try; the pause doubles with every try.
        clock: seconds, from any moment on.
        jitter: a number in [0, 1), so that callers refused at the same time do not come back at the same time.
    """

    tries: int = 5
    seconds: float = 60.0
    first_pause: float = 0.25
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random

    def begin(self) -> Attempts:
        """Return the count of a request that is about to be sent for the first time."""
        return Attempts(self)


class Attempts:
    """The tries of one request."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._failed = 0
        self._ends_at = retries.clock() + retries.seconds

    def pause_after(self, error: ClientError, *, answered_before: bool) -> float | None:
        """Return the seconds to wait before the next try, never less than `Retry-After` names; None: give up.

        Args:
            answered_before: whether the address ever answered. If not, a refused connection is rather a wrong
                address than a server that starts again.
        """
        self._failed += 1
        if not error.temporary or self._failed >= self._retries.tries:
            return None
        if isinstance(error, Unreachable) and error.never_connected and not answered_before:
            return None
        pause = min(self._retries.first_pause * 2 ** (self._failed - 1), _LONGEST_PAUSE)
        if error.retry_after is None:
            pause *= (1 + self._retries.jitter()) / 2
        else:
            pause = error.retry_after + pause * self._retries.jitter()
        return pause if self._retries.clock() + pause <= self._ends_at else None
