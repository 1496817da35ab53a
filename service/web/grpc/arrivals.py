"""Turns in which messages arrive: the library holds what has come of each, and nobody counts those bytes.

A message that has arrived is counted with all other bodies, by `service.web.receiving`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from service.errors import RequestTimeout
from service.settings import Settings
from service.web.receiving import GRACE_SECONDS

_FEWEST: Final = 8


class Arrivals:
    """Lets `most` messages arrive at the same time, in the order of their calls. Belongs to one event loop.

    One that has not arrived after `grace` seconds gives way as soon as another waits for its turn.
    """

    def __init__(self, most: int, grace: float = GRACE_SECONDS) -> None:
        self._places = asyncio.Semaphore(most)
        self._grace = grace
        self._waiting = 0

    @classmethod
    def of(cls, settings: Settings) -> Arrivals:
        """Return the turns of one worker: as many as its part of the bytes that may be received has largest bodies."""
        return cls(max(_FEWEST, settings.max_receiving_bytes // settings.max_request_bytes // settings.workers))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the context; raises `RequestTimeout` in it if it gives way."""
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal timer
            if self._waiting:
                time_limit.reschedule(loop.time())
            else:
                timer = loop.call_later(self._grace / 4, look)

        timer = loop.call_later(self._grace, look)
        try:
            async with asyncio.timeout(None) as time_limit:
                yield
        except TimeoutError:
            if not time_limit.expired():
                raise
            raise RequestTimeout("the message came too slowly while others waited for their turn") from None
        finally:
            timer.cancel()
            self._places.release()
