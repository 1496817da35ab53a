"""Limits the images of several web workers together; the count lies in shared memory."""

from __future__ import annotations

from service.cluster.shared_memory import SharedCounters
from service.web.admission import Limiter


class SharedLimiter(Limiter):
    """Counts its permits over all web workers.

    Args:
        counters: where the workers count.
        worker: which of them this is.
    """

    def __init__(self, counters: SharedCounters, worker: int) -> None:
        super().__init__(counters.capacity)
        self._counters = counters
        self._worker = worker

    def acquire(self) -> None:
        """Take a place that is counted for all workers; see `Limiter.acquire`."""
        self._counters.acquire_permit(self._worker)
        self.in_use += 1

    def release(self, count: int = 1) -> None:
        """Give places back for all workers; see `Limiter.release`."""
        super().release(count)
        self._counters.permits_taken[self._worker] = self.in_use
