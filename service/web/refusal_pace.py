"""The pace of refusals: callers that repeat a refused request at once get late answers."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from service.errors import (
    EngineUnavailable,
    MalformedRequest,
    QueueFull,
    ReceivingFull,
    Unauthorized,
)
from service.http.connection import HttpConnection

PAUSE_SECONDS: Final = 1.0
"""Delay of a refusal; twice as long for clients that ignore Retry-After."""

_REFUSALS_A_SECOND: Final = 500
"""Refusals a second without a delay; they take a tenth of a core."""

_MISTAKES_A_SECOND: Final = 50
"""Refusals a second of one caller's mistakes without a delay."""


class RefusalPace:
    """Delays refusals of callers that repeat their request at once.

    A refusal costs 0.2 ms, and reading and discarding its picture as much again. A hundred callers
    that come back at once would take the core that answers others. So a caller that comes back on
    its connection within a second waits for two seconds. Beyond `most` refusals a second, all
    others wait for one second.

    Mistakes are counted for each caller, so that a flood of them does not delay the refusals of
    other callers.

    Args:
        clock: monotonic seconds.
        most: number of refusals a second without a delay.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, most: float = _REFUSALS_A_SECOND
    ) -> None:
        self._clock = clock
        self._most = most
        self._credit = most
        self._counted_at = clock()
        self._mistakes: Counter[str] = Counter()  # of each caller in the current second
        self._second = 0

    def delay_after(
        self, error: Exception, connection: HttpConnection | None, caller: str
    ) -> float:
        """Return the seconds for which the answer to an error is to wait."""
        # Callers that retry at once would take the processors from a busy engine.
        if isinstance(error, QueueFull | EngineUnavailable):
            return self.delay(connection)
        if isinstance(error, ReceivingFull | MalformedRequest | Unauthorized):
            return self.delay_of(caller)
        return 0.0

    def delay(self, connection: HttpConnection | None) -> float:
        """Return the seconds for which a refusal on this connection is to wait."""
        now = self._clock()
        earned = (now - self._counted_at) * self._most
        self._credit = min(self._most, self._credit + earned)
        self._counted_at = now
        comes_back = connection is not None and now - connection.refused_at < PAUSE_SECONDS
        if comes_back:
            delay = 2 * PAUSE_SECONDS
        elif self._credit < 1:
            delay = PAUSE_SECONDS
        else:
            delay = 0.0
            self._credit -= 1
        if connection is not None:
            connection.refused_at = now + delay
        return delay

    def delay_of(self, caller: str) -> float:
        """Return the seconds for which the refusal of a caller's mistake is to wait."""
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._mistakes.clear()
        self._mistakes[caller] += 1
        return PAUSE_SECONDS if self._mistakes[caller] > _MISTAKES_A_SECOND else 0.0
