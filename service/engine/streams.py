"""The threads of an engine: each stream takes the next batch from the queue that all share, and launches it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from model.errors import VitError
from service.engine.base import ModelRunner
from service.engine.batching import BatchQueue, Poll
from service.engine.launch import Outcome, Waiting, launch
from service.engine.messages import BatchReport, InferenceRequest
from service.errors import EngineUnavailable, ServiceError

logger = logging.getLogger(__name__)

Deliver = Callable[[Iterable[tuple[Waiting, Outcome]], BatchReport | None], None]


class Streams:
    """A batch queue behind a lock, and as many threads as the runner has streams to empty it.

    Args:
        queue_size, max_delay, clock: see `BatchQueue`.
        deliver: called on a stream's thread after each launch, with each image's outcome and the report of the
            launch, or None if the launch ended the engine.
        on_queue: called with the number of waiting images whenever it changes, on any thread.
    """

    def __init__(
        self,
        *,
        queue_size: int,
        max_delay: float,
        deliver: Deliver,
        on_queue: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        self._queue: BatchQueue[InferenceRequest] = BatchQueue(capacity=queue_size, max_delay=max_delay, clock=clock)
        self._deliver = deliver
        self._on_queue = on_queue
        self._clock = clock
        self._wake = threading.Condition()
        self._stopping = False
        self._launched_at: dict[int, float] = {}
        self._failures: list[BaseException] = []

    def __len__(self) -> int:
        """Return the number of images that wait."""
        return len(self._queue)

    def put(self, request: InferenceRequest, timeout: float) -> Waiting:
        """Add an image that must be launched within `timeout` seconds from now; raises as `BatchQueue.put`."""
        with self._wake:
            entry = self._queue.put(request, deadline=self._clock() + timeout)
            self._on_queue(len(self._queue))
            self._wake.notify()
        return entry

    def cancel(self, entry: Waiting) -> None:
        """Take an image out of the queue if it is still there."""
        with self._wake:
            self._queue.cancel(entry)
            self._on_queue(len(self._queue))

    def computing_seconds(self) -> float:
        """Return how long the oldest batch that is computed has been; 0 when there is none."""
        with self._wake:
            return self._clock() - min(self._launched_at.values()) if self._launched_at else 0.0

    def run(self, runner: ModelRunner) -> None:
        """Launch batches until `stop`, on this thread and one more for each further stream of the runner.

        What ends the first stream that fails ends the others too, and is raised.
        """
        others = [
            threading.Thread(target=self._serve, args=(runner,), name=f"engine-{number}", daemon=True)
            for number in range(1, runner.streams)
        ]
        for thread in others:
            thread.start()
        self._serve(runner)
        for thread in others:
            thread.join()
        for failure in self._failures[1:]:
            logger.error("another stream failed too", exc_info=failure)
        if self._failures:
            raise self._failures[0]

    def stop(self) -> None:
        """End each stream after the batch that it computes; what waits is left in the queue."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()

    def close(self) -> list[Waiting]:
        """Refuse further images and hand back those that wait, oldest first."""
        with self._wake:
            returned = self._queue.close()
            self._on_queue(0)
        return returned

    def _serve(self, runner: ModelRunner) -> None:
        batch: list[Waiting] = []
        try:
            while (poll := self._next(runner.max_batch)) is not None:
                batch = poll.batch
                outcomes, report = launch(runner, batch, poll.release, self._clock)
                self._deliver(list(zip(batch, outcomes, strict=True)), report)
        except BaseException as error:  # noqa: BLE001  raised by `run`
            # Whatever ends the engine, those that were on board hear of it.
            self._deliver([(entry, EngineUnavailable(reason_of(error))) for entry in batch], None)
            self._failures.append(error)
            self.stop()

    def _next(self, max_batch: int) -> Poll[InferenceRequest] | None:
        """Return the next batch as soon as there is one, or None when the stream is to end."""
        stream = threading.get_ident()
        with self._wake:
            self._launched_at.pop(stream, None)
            while not self._stopping:
                poll = self._queue.poll(max_batch)
                self._on_queue(len(self._queue))
                if poll.batch:
                    self._launched_at[stream] = self._clock()
                    return poll
                self._wake.wait(poll.wait)
        return None


def reason_of(error: BaseException) -> str:
    """Return why an engine ended: errors of ours speak for themselves, others need their type's name."""
    return str(error) if isinstance(error, VitError | ServiceError) else f"{type(error).__name__}: {error}"
