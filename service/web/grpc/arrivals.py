"""Turns in which messages arrive, because the library holds their bytes until they are whole and does not count them.

A message that has arrived is counted with all other bodies, by `service.web.admission`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager, suppress
from typing import Final

from service.errors import ReceivingFull, RequestTimeout
from service.settings import Settings
from service.web.admission import GRACE_SECONDS

_FEWEST: Final = 8
_LOOKS: Final = 16
"""Checks of a message during the grace."""


class Arrivals:
    """Lets `most` messages arrive at the same time. Belongs to one event loop.

    A turn goes to the caller that has the fewest. A message that has not arrived in time gives way when another waits,
    unless some caller has more turns than its own. So a caller with many calls delays itself, and no others.

    Args:
        most_waiting: calls that wait for a turn; beyond it the caller with the most of them loses its newest.
        grace: seconds that a message has; fewer, the more callers wait.
    """

    def __init__(self, most: int, most_waiting: int, grace: float = GRACE_SECONDS) -> None:
        self._most = most
        self._most_waiting = most_waiting
        self._grace = grace
        self._held: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @classmethod
    def of(cls, settings: Settings) -> Arrivals:
        """Return the turns of a worker: as many as largest bodies fit into its part of the bytes to be received."""
        most = settings.max_receiving_bytes // settings.max_request_bytes // settings.workers
        return cls(max(_FEWEST, most), max(1, settings.max_connections // 2))

    @asynccontextmanager
    async def turn(self, caller: Hashable) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the context; raises `ReceivingFull`, or `RequestTimeout` in it."""
        await self._take(caller)
        loop = asyncio.get_running_loop()
        began = loop.time()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            patience = self._grace / (1 + len(self._waiting) // _FEWEST)
            if self._waiting and loop.time() - began >= patience and self._held[caller] == max(self._held.values()):
                time_limit.reschedule(loop.time())
            else:
                timer = loop.call_later(self._grace / _LOOKS, look)

        timer = loop.call_later(self._grace / _LOOKS, look)
        try:
            async with asyncio.timeout(None) as time_limit:
                yield
        except TimeoutError:
            if not time_limit.expired():
                raise
            raise RequestTimeout("the message came too slowly while others waited for their turn") from None
        finally:
            timer.cancel()
            self._leave(caller)

    async def _take(self, caller: Hashable) -> None:
        if self._held.total() < self._most:
            self._held[caller] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        if sum(map(len, self._waiting.values())) > self._most_waiting:
            crowded = max(self._waiting, key=lambda waiting: len(self._waiting[waiting]))
            refused = self._waiting[crowded][-1]
            self._forget(crowded, refused)
            refused.set_exception(ReceivingFull("too many calls wait for their messages to be read"))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(caller, turn)
            elif turn.exception() is None:  # it got its turn at the same moment
                self._leave(caller)
            raise

    def _leave(self, caller: Hashable) -> None:
        """Give a caller's turn to the next."""
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]
        while self._waiting:
            following = min(self._waiting, key=lambda waiting: self._held[waiting])
            turns = self._waiting.pop(following)
            turn = turns.popleft()
            if turns:
                self._waiting[following] = turns  # behind the other callers
            if not turn.cancelled():
                self._held[following] += 1
                turn.set_result(None)
                return

    def _forget(self, caller: Hashable, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(caller, deque())
        with suppress(ValueError):
            turns.remove(turn)
        if not turns:
            self._waiting.pop(caller, None)
