"""Many moments on one timer of the event loop: nearly all of them are cancelled before they come."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

_SHORTEST_SLEEP: Final = 0.005
"""Seconds between two looks at what is due: each look costs as much as all that is set."""


class Timers:
    """Calls functions at moments of the running event loop's clock."""

    def __init__(self) -> None:
        self._set: dict[object, tuple[float, Callable[[], object]]] = {}
        self._timer: asyncio.Handle | None = None
        self._rings_at = math.inf
        self._loop: asyncio.AbstractEventLoop | None = None

    def set(self, key: object, seconds: float, ring: Callable[[], object]) -> None:
        """Call `ring` once in so many seconds, unless the key is cleared before."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the timer of a loop that has ended never rings
            self._loop, self._timer, self._rings_at = loop, None, math.inf
        due = loop.time() + seconds
        self._set[key] = due, ring
        if due < self._rings_at:
            self._ring_at(loop, due)

    def clear(self, key: object) -> None:
        """Forget what was set for a key, if anything was."""
        self._set.pop(key, None)

    def _ring_at(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Its own `when` is not asked: uvloop gives a plain handle for a moment that is already past.
        self._timer, self._rings_at = loop.call_at(due, self.ring), due

    def ring(self) -> None:
        """Call what is due at the moment for which the timer is set, at least."""
        loop = asyncio.get_running_loop()
        now = loop.time() if math.isinf(self._rings_at) else max(loop.time(), self._rings_at)
        self._timer, self._rings_at = None, math.inf
        for key in [key for key, (due, _) in self._set.items() if due <= now]:
            if key in self._set:
                self._set.pop(key)[1]()
        if self._set:
            earliest = min(due for due, _ in self._set.values())
            self._ring_at(loop, min(self._rings_at, max(earliest, now + _SHORTEST_SLEEP)))


class TimeLimit:
    """Raises `TimeoutError` where its context lasts longer than `seconds`; as `asyncio.timeout`, with shared timers.

    Attributes:
        expired: whether the time is up.
    """

    def __init__(self, timers: Timers, seconds: float) -> None:
        self.expired = False
        self._timers = timers
        self._seconds = seconds

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "what is limited is a task"
        self._task, self._cancelling = task, task.cancelling()
        self._timers.set(self, self._seconds, self.expire)
        return self

    def expire(self) -> None:
        """End it now."""
        if not self.expired:
            self.expired = True
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._timers.clear(self)
        if self.expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error
