"""Detects an event loop that no longer turns, and a process that uses no processor time.

Each event loop increments a cell. With one process a thread reads the cell and ends the process, so that whatever
supervises it starts it again. With several processes the cells lie in shared memory, and the supervisor reads them. A
busy machine may delay the turn of a healthy event loop by seconds, but it lets a process use some processor time. So a
process is frozen after a short silence without processor time, or after a long silence.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.http.lifecycle import exit_now

logger = logging.getLogger("vitserve")

BEAT_SECONDS = 0.5

_FROZEN_SECONDS = 3.0
_STUCK_SECONDS = 30.0
_FROZEN_AT_START_SECONDS = 60.0
"""A process that maps a gigabyte of libraries may wait for the disk while it holds the interpreter's lock."""

_LOOK_SECONDS = 1.0
_LONGEST_LOOK = 1.5


async def keep_beating(cells: NDArray[np.uint64], index: int) -> None:
    """Increment a cell on the running event loop, until cancelled."""
    while True:
        cells[index] += 1
        await asyncio.sleep(BEAT_SECONDS)


@dataclass(eq=False)
class Pulse:
    """Decides from successive looks whether a process is frozen: idle is silent, and without processor time."""

    beat: int = 0
    cpu_seconds: float = 0.0
    looked_at: float | None = None
    silent_seconds: float = 0.0
    idle_seconds: float = 0.0

    def look(self, now: float, beat: int, cpu_seconds: float = 0.0) -> None:
        """Note the count of a process' event loop and its processor time; call it about every second."""
        # The observer may have been stopped too, perhaps with the whole machine: that time does not count.
        passed = 0.0 if self.looked_at is None else min(now - self.looked_at, _LONGEST_LOOK)
        self.silent_seconds = self.silent_seconds + passed if beat == self.beat else 0.0
        works = beat != self.beat or cpu_seconds != self.cpu_seconds
        self.idle_seconds = 0.0 if works else self.idle_seconds + passed
        self.beat, self.cpu_seconds, self.looked_at = beat, cpu_seconds, now

    def is_frozen(self, now: float, beat: int, cpu_seconds: float, *, starting: bool) -> bool:
        """Look at a process, and return whether it is frozen; a `starting` process may make long calls."""
        self.look(now, beat, cpu_seconds)
        if starting:
            return self.idle_seconds >= _FROZEN_AT_START_SECONDS
        return self.idle_seconds >= _FROZEN_SECONDS or self.silent_seconds >= _STUCK_SECONDS


class Watchdog:
    """Ends the process with 1 when its event loop has not turned for `timeout` seconds, from a thread of its own.

    A collection of garbage, or a busy machine, may hold a healthy loop up for seconds.
    """

    def __init__(
        self,
        timeout: float = _STUCK_SECONDS,
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = exit_now,
    ) -> None:
        self.beats = np.zeros(1, np.uint64)
        self._timeout = timeout
        self._clock = clock
        self._end = end
        self._pulse = Pulse(looked_at=clock())
        self._ended = threading.Event()

    async def watch(self) -> None:
        """Start the thread, and count the turns of the running event loop until cancelled."""
        threading.Thread(target=self._look_again_and_again, name="watchdog", daemon=True).start()
        try:
            await keep_beating(self.beats, 0)
        finally:
            self._ended.set()  # a loop that has ended turns no more, and is not to end its process

    def look(self) -> bool:
        """End the process if its event loop has not turned for `timeout` seconds; return whether that was so."""
        self._pulse.look(self._clock(), int(self.beats[0]))
        if self._pulse.silent_seconds < self._timeout:
            return False
        logger.critical("the event loop has not turned for %g s: ending", self._timeout)
        self._end(1)
        return True

    def _look_again_and_again(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS) and not self.look():
            pass
