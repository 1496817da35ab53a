"""Scrapes that come at once share one text, because writing it holds the event loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from service.background import Tasks

# Pause after a text, as a multiple of the time that writing it took.
_PAUSE: Final = 4
# Longest pause: waiting for other replicas takes seconds, but not the event loop's time.
_LONGEST_PAUSE_SECONDS: Final = 1.0


class Scrapes:
    """The texts that scrapes get; a text is never older than the scrape that gets it.

    However many clients scrape, writing texts takes at most a fifth of the event loop's time:

        scrape A   begins a text of 30 ms
        scrape B   arrives after it; the next text may begin 120 ms after the end of the first one
        scrape C   arrives meanwhile, and gets the same text as B

    Args:
        write: writes the text.
        clock: monotonic clock in seconds.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        write: Callable[[], Awaitable[bytes]],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._write = write
        self._clock = clock
        self._sleep = sleep
        self._tasks = Tasks()
        self._lock = asyncio.Lock()
        self._earliest = clock()
        self._waiting: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        """Return a text begun after this call; raises the errors of its writing."""
        if self._waiting is None:
            self._waiting = self._tasks.begin(self._write_later())
        # Other scrapes wait for the same text, even if this one ends.
        return await asyncio.shield(self._waiting)

    async def _write_later(self) -> bytes:
        async with self._lock:
            try:
                await self._sleep(max(0, self._earliest - self._clock()))
            finally:
                self._waiting = None  # a later scrape gets a later text
            began = self._clock()
            try:
                return await self._write()
            finally:
                ended = self._clock()
                self._earliest = ended + min(_PAUSE * (ended - began), _LONGEST_PAUSE_SECONDS)
