"""Notices a process that lives and does nothing: stopped, deadlocked, or in a call that never returns.

Each process's event loop counts a cell of shared memory up, and the supervisor looks at it. A busy machine may keep a
healthy event loop from its turn for seconds, but not a whole process from the processor. So a process is frozen after
a short silence only if it used no processor time meanwhile, and otherwise after a long one.
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
"""Whoever starts may wait for a disk with the interpreter's lock held: libraries of a gigabyte are mapped."""

_LONGEST_LOOK = 1.5


async def keep_beating(cells: NDArray[np.uint64], index: int) -> None:
    """Count a cell up on the running event loop, until cancelled."""
    while True:
        cells[index] += 1
        await asyncio.sleep(BEAT_SECONDS)


@dataclass(eq=False)
class Pulse:
    """Decides, from one look after the other, whether a process is frozen.

    Attributes:
        silent_seconds: without a beat.
        idle_seconds: without a beat and without processor time.
    """

    beat: int = 0
    cpu_seconds: float = 0.0
    looked_at: float | None = None
    silent_seconds: float = 0.0
    idle_seconds: float = 0.0

    def is_frozen(self, now: float, beat: int, cpu_seconds: float, *, starting: bool) -> bool:
        """Look at a process; call it about every second.

        Args:
            now: monotonic seconds.
            beat: the count of its event loop.
            cpu_seconds: processor time that it has used.
            starting: whether it has yet to begin its work, so that long calls are expected of it.
        """
        # Whoever looks may have stood still too, with the whole machine: a child is not silent for that time.
        passed = 0.0 if self.looked_at is None else min(now - self.looked_at, _LONGEST_LOOK)
        self.silent_seconds = self.silent_seconds + passed if beat == self.beat else 0.0
        works = beat != self.beat or cpu_seconds != self.cpu_seconds
        self.idle_seconds = 0.0 if works else self.idle_seconds + passed
        self.beat, self.cpu_seconds, self.looked_at = beat, cpu_seconds, now
        if starting:
            return self.idle_seconds >= _FROZEN_AT_START_SECONDS
        return self.idle_seconds >= _FROZEN_SECONDS or self.silent_seconds >= _STUCK_SECONDS
