"""The images for which callers wait on the event loop.

Every image gets exactly one outcome: its result, an error of its own, or cancellation. A timer of
the event loop ends the image at its deadline, even if all threads are busy, and the queue does not
launch it later.
"""

import asyncio
from collections.abc import Callable, Iterable

from service.engine.messages import BatchReport, InferenceResult
from service.engine.streams import Outcome, Waiting
from service.errors import DeadlineExceeded, EngineUnavailable


class PendingImages:
    """The queued and launched images of one engine, with the futures of their callers.

    Args:
        on_batch: called with the report of every launch, for metrics.
    """

    def __init__(self, on_batch: Callable[[BatchReport], None]) -> None:
        self._on_batch = on_batch
        self._futures: dict[Waiting, asyncio.Future[InferenceResult]] = {}

    async def result(
        self, entry: Waiting, *, timeout: float, cancel: Callable[[Waiting], None]
    ) -> InferenceResult:
        """Return the result of a queued image; raises as `Engine.infer`.

        Args:
            entry: the image's stay in a queue.
            timeout: seconds within which it must be launched.
            cancel: takes it out of the queue.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[InferenceResult] = loop.create_future()
        self._futures[entry] = future
        timer = loop.call_later(timeout, self._expire, entry, cancel)
        try:
            return await future
        except asyncio.CancelledError:
            cancel(entry)
            raise
        finally:
            timer.cancel()
            self._futures.pop(entry, None)

    def deliver(
        self, outcomes: Iterable[tuple[Waiting, Outcome]], report: BatchReport | None = None
    ) -> None:
        """Give each image its outcome, unless its caller has left or has an answer."""
        for entry, outcome in outcomes:
            future = self._futures.get(entry)
            if future is None or future.done():
                continue
            if isinstance(outcome, InferenceResult):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)
        if report is not None:
            self._on_batch(report)

    def fail(self, reason: str) -> None:
        """Answer `EngineUnavailable` for all images."""
        self.deliver([(entry, EngineUnavailable(reason)) for entry in list(self._futures)])

    def _expire(self, entry: Waiting, cancel: Callable[[Waiting], None]) -> None:
        """Answer that an image's time is up, unless it was launched; it will not be launched."""
        cancel(entry)
        if not entry.launched:
            self.deliver([(entry, DeadlineExceeded("the image was not launched in time"))])
