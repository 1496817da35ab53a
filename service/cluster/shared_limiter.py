"""The limiter of several web workers: the bound is over all of them, and the count lies in shared memory."""

from __future__ import annotations

from service.cluster.shared_memory import SharedCounters
from service.web.admission import Limiter


class SharedLimiter(Limiter):
    """The same, counted over all web workers.

    Args:
        board: where the workers count.
        worker: which of them this is.
    """

    def __init__(self, board: SharedCounters, worker: int) -> None:
        super().__init__(board.capacity)
        self._board = board
        self._worker = worker

    def acquire(self) -> None:
        """See `Limiter.acquire`."""
        self._board.take_place(self._worker)
        self.in_use += 1

    def release(self, count: int = 1) -> None:
        """See `Limiter.release`."""
        super().release(count)
        self._board.places_taken[self._worker] = self.in_use
