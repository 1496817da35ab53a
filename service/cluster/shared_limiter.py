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

    def take(self) -> None:
        """See `Limiter.take`."""
        self._board.take_place(self._worker)
        self.taken += 1

    def give_back(self, count: int) -> None:
        """See `Limiter.give_back`."""
        super().give_back(count)
        self._board.places_taken[self._worker] = self.taken
