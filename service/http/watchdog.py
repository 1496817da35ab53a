"""Ends a process whose event loop no longer turns, so that whoever supervises it starts it again."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from service.http.signals import exit_now

logger = logging.getLogger("vitserve")

_TURN_SECONDS = 0.5
_LOOK_SECONDS = 1.0


class Watchdog:
    """Counts the turns of an event loop, and looks at the count from a thread of its own.

    Args:
        timeout: seconds without a turn after which the process ends with 1.
        clock: monotonic seconds.
        end: ends the process with an exit code.
    """

    def __init__(
        self,
        timeout: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = exit_now,
    ) -> None:
        self._timeout = timeout
        self._clock = clock
        self._end = end
        self._turns = 0
        self._seen = 0
        self._looked_at = clock()
        self._silent_seconds = 0.0
        self._ended = threading.Event()

    async def watch(self) -> None:
        """Start the thread, and count the turns of the running event loop until cancelled."""
        threading.Thread(target=self._look_again_and_again, name="watchdog", daemon=True).start()
        try:
            while True:
                self.turn()
                await asyncio.sleep(_TURN_SECONDS)
        finally:
            self._ended.set()  # a loop that has ended turns no more, and is not to end its process

    def turn(self) -> None:
        """Count a turn."""
        self._turns += 1

    def look(self) -> bool:
        """End the process if its event loop has not turned for too long, and return whether it was so."""
        now = self._clock()
        # What kept this thread from looking kept the event loop from turning: that time does not count.
        passed = min(now - self._looked_at, 1.5 * _LOOK_SECONDS)
        self._silent_seconds = self._silent_seconds + passed if self._turns == self._seen else 0.0
        self._seen, self._looked_at = self._turns, now
        if self._silent_seconds < self._timeout:
            return False
        logger.critical("the event loop has not turned for %g s: ending", self._timeout)
        self._end(1)
        return True

    def _look_again_and_again(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS) and not self.look():
            pass
