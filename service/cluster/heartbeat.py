"""Detects an event loop that no longer turns, and a process that uses no processor time.

Each event loop increments a cell in shared memory, and the supervisor reads the cells. A busy machine
may delay the turn of a healthy event loop by seconds, but it lets a process use some processor time. So a process is
frozen after a short silence without processor time, or after a long silence.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BEAT_SECONDS = 0.5

_FROZEN_SECONDS = 3.0
_STUCK_SECONDS = 30.0
_FROZEN_AT_START_SECONDS = 60.0
"""A process that maps a gigabyte of libraries may wait for the disk while it holds the interpreter's lock."""

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
