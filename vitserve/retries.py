"""When a request is tried again, and after which pause. Every request of the service may be: none changes anything."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from vitserve.errors import ClientError, Unreachable

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


class Attempts:
    """The tries of one request to the service at `address`."""

    def __init__(self, retries: Retries, address: httpx.URL) -> None:
        self._retries, self._address = retries, address
        self._failed = 0
        self._ends_at = retries.clock() + retries.seconds

    def pause_after(self, error: ClientError | httpx.TransportError, *, answered_before: bool) -> float:
        """Return the seconds to wait before the next try, never less than `Retry-After` names.

        Args:
            answered_before: whether the address ever answered. If not, a refused connection is rather a wrong
                address than a server that starts again.

        Raises:
            ClientError: there is no next try; `Unreachable` for an error of httpx.
        """
        self._failed += 1
        failure = error if isinstance(error, ClientError) else Unreachable(error, self._address)
        if not failure.temporary or self._failed >= self._retries.tries:
            raise failure
        if isinstance(failure, Unreachable) and failure.never_connected and not answered_before:
            raise failure
        pause: float = min(self._retries.first_pause * 2 ** (self._failed - 1), _LONGEST_PAUSE)
        if failure.retry_after is None:
            pause *= (1 + self._retries.jitter()) / 2
        else:
            pause = failure.retry_after + pause * self._retries.jitter()
        if self._retries.clock() + pause > self._ends_at:
            raise failure
        return pause
