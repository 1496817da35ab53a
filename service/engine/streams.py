"""The threads of an engine: each stream takes the next batch from the queue that all share, and launches it.

Every image of a launch gets an outcome, and an image that the model fails on fails alone.

Maps that need a pass of their own have a queue and a thread of their own, behind classification: a small batch is
launched only while no other image waits, or when a map has waited for long, and its thread has a lower priority.
What the runner has still to load something for, as torch, goes there too, until that is loaded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from model.errors import CheckpointChanged, VitError
from model.outputs import RequestedOutputs
from service.engine.base import ModelRunner
from service.engine.batching import BatchQueue, Entry, Poll
from service.engine.messages import BatchReport, InferenceRequest, InferenceResult, Release
from service.errors import EngineUnavailable, InferenceFailed, ServiceError
from service.priority import lower_priority, seconds_without_core

logger = logging.getLogger(__name__)

MAX_EXPLANATION_BATCH: Final = 8
"""Images in a batch of explanations at most, so that it does not hold the device for long."""

MAX_EXPLANATION_WAIT: Final = 1.0
"""Seconds after which a map no longer waits for classification, which under constant load never pauses."""

Outcome = InferenceResult | ServiceError
Waiting = Entry[InferenceRequest]
"""An image in the queue, or taken out of it."""

Deliver = Callable[[Iterable[tuple[Waiting, Outcome]], BatchReport | None], None]


class Streams:
    """Two batch queues behind a lock, with a thread for each stream of the runner, and a thread for explanations.

    Streams and explanations wait for conditions of their own: to wake the thread of explanations with each image that
    is to be classified would cost a request two switches of threads.

    Args:
        queue_size, max_delay, clock: see `BatchQueue`; each queue is of that size, and explanations are never delayed.
        deliver: called on a stream's thread after each launch, with each image's outcome and the report of the
            launch, or None if the launch ended the engine.
        on_queue: called with the number of waiting images whenever it changes, on any thread.
        without_core: returns for how many seconds of its life the thread of a native id has waited for a core.
    """

    def __init__(
        self,
        *,
        queue_size: int,
        max_delay: float,
        deliver: Deliver,
        on_queue: Callable[[int], None],
        clock: Callable[[], float],
        without_core: Callable[[int], float] = seconds_without_core,
    ) -> None:
        self._queue: BatchQueue[InferenceRequest] = BatchQueue(capacity=queue_size, max_delay=max_delay, clock=clock)
        self._explanations: BatchQueue[InferenceRequest] = BatchQueue(capacity=queue_size, max_delay=0.0, clock=clock)
        self._deliver = deliver
        self._on_queue = on_queue
        self._clock = clock
        self._without_core = without_core
        lock = threading.Lock()
        self._wake, self._wake_explanations = threading.Condition(lock), threading.Condition(lock)
        self._stopping = False
        self._defers: Callable[[RequestedOutputs], bool] = _never
        self._launched_at: dict[int, float] = {}
        self._waited_before: dict[tuple[int, float], float] = {}
        self._failures: list[BaseException] = []

    def __len__(self) -> int:
        """Return the number of images that wait."""
        return len(self._queue) + len(self._explanations)

    def put(self, request: InferenceRequest, timeout: float) -> Waiting:
        """Add an image that must be launched within `timeout` seconds from now; raises as `BatchQueue.put`."""
        with self._wake:
            queue = self._queue_of(request)
            entry = queue.put(request, deadline=self._clock() + timeout)
            self._on_queue(len(self))
            self._condition_of(queue).notify()
        return entry

    def cancel(self, entry: Waiting) -> None:
        """Take an image out of the queue if it is still there."""
        with self._wake:
            (self._explanations if entry in self._explanations else self._queue).cancel(entry)
            self._on_queue(len(self))
            self._wake_if_explanations_alone_wait()

    def _wake_if_explanations_alone_wait(self) -> None:
        if len(self._explanations) and not len(self._queue):
            self._wake_explanations.notify()

    def _queue_of(self, request: InferenceRequest) -> BatchQueue[InferenceRequest]:
        is_slow = request.requested.needs_pass or self._defers(request.requested)
        return self._explanations if is_slow else self._queue

    def _condition_of(self, queue: BatchQueue[InferenceRequest]) -> threading.Condition:
        return self._wake_explanations if queue is self._explanations else self._wake

    def computing_seconds(self) -> float:
        """Return for how long the oldest batch under way has been computed, in seconds; 0 without a batch.

        From the first look at a batch on, time for which its thread waits for a core does not count: on a machine that
        others keep busy, a thread of low priority may wait for longer than any batch computes.
        """
        with self._wake:
            now, batches = self._clock(), list(self._launched_at.items())
        waited = {batch: self._without_core(batch[0]) for batch in batches}
        self._waited_before = {batch: self._waited_before.get(batch, waited[batch]) for batch in batches}
        return max((now - batch[1] - (waited[batch] - self._waited_before[batch]) for batch in batches), default=0.0)

    def run(self, runner: ModelRunner) -> None:
        """Launch batches until `stop`: on this thread, a thread for each further stream, and a thread for explanations.

        The error of the first stream that fails ends the others too, and is raised.
        """
        self._defers = runner.defers
        others = [
            threading.Thread(target=self._classify, args=(runner,), name=f"engine-{number}", daemon=True)
            for number in range(1, runner.streams)
        ]
        others.append(threading.Thread(target=self._explain, args=(runner,), name="engine-maps", daemon=True))
        for thread in others:
            thread.start()
        self._classify(runner)
        for thread in others:
            thread.join()
        self._defers = _never  # whoever holds this engine does not hold the model
        for failure in self._failures[1:]:
            logger.error("another stream failed too", exc_info=failure)
        if self._failures:
            raise self._failures[0]

    def stop(self) -> None:
        """End each stream after the batch that it computes; what waits is left in the queue."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
            self._wake_explanations.notify_all()

    def close(self) -> list[Waiting]:
        """Refuse further images and hand back those that wait, oldest first."""
        with self._wake:
            returned = self._queue.close() + self._explanations.close()
            self._on_queue(0)
        return returned

    def _explain(self, runner: ModelRunner) -> None:
        lower_priority()
        self._launch_all(runner, self._explanations, min(runner.max_batch, MAX_EXPLANATION_BATCH))

    def _classify(self, runner: ModelRunner) -> None:
        self._launch_all(runner, self._queue, runner.max_batch)

    def _launch_all(self, runner: ModelRunner, queue: BatchQueue[InferenceRequest], max_batch: int) -> None:
        batch: list[Waiting] = []
        try:
            while (poll := self._next(queue, max_batch)) is not None:
                batch = poll.batch
                outcomes, report = launch(runner, batch, poll.release, self._clock)
                self._deliver(list(zip(batch, outcomes, strict=True)), report)
        except BaseException as error:  # noqa: BLE001  raised by `run`
            # Whatever ends the engine, the callers of this batch get an error.
            self._deliver([(entry, EngineUnavailable(reason_of(error))) for entry in batch], None)
            self._failures.append(error)
            self.stop()

    def _next(self, queue: BatchQueue[InferenceRequest], max_batch: int) -> Poll[InferenceRequest] | None:
        """Return the next batch of a queue as soon as the queue releases it, or None when the stream is to end."""
        stream, condition = threading.get_native_id(), self._condition_of(queue)
        with condition:
            self._launched_at.pop(stream, None)
            while not self._stopping:
                if queue is self._explanations and len(self._queue) and (age := queue.age()) < MAX_EXPLANATION_WAIT:
                    condition.wait(MAX_EXPLANATION_WAIT - age if len(queue) else None)
                    continue
                waited = len(queue)
                poll = queue.poll(max_batch)
                self._on_queue(len(self))
                if queue is self._queue and len(queue) < waited:  # images were taken, or were out of time
                    self._wake_if_explanations_alone_wait()
                if poll.batch:
                    self._launched_at[stream] = self._clock()
                    return poll
                condition.wait(poll.wait)
        return None


def _never(requested: RequestedOutputs) -> bool:
    return False


def reason_of(error: BaseException) -> str:
    """Return why an engine ended: errors of ours speak for themselves, others need their type's name."""
    return str(error) if isinstance(error, VitError | ServiceError) else f"{type(error).__name__}: {error}"


def launch(
    runner: ModelRunner, batch: Sequence[Waiting], release: Release, clock: Callable[[], float]
) -> tuple[list[Outcome], BatchReport]:
    """Compute a batch, and if that fails, its images one by one.

    Args:
        batch: at least one image, and at most `runner.max_batch`.
        clock: monotonic seconds, the same that the queue reads.

    Returns:
        The outcome of each image, in the batch's order, and the report of the launch.

    Raises:
        EngineUnavailable: the device no longer computes.
    """
    launched = clock()
    try:
        outcomes = _predict(runner, batch, launched, clock)
    except (RuntimeError, ValueError, MemoryError) as error:
        logger.warning("a batch of %d failed, trying its images one by one: %s", len(batch), error)
        outcomes = [_predict_alone(runner, entry, launched, clock) for entry in batch]
    if all(isinstance(outcome, InferenceFailed) for outcome in outcomes):
        # Every image failed. If an empty image fails too, the device is lost, and the engine ends.
        try:
            runner.check()
        except VitError as error:
            raise EngineUnavailable(f"the device failed: {error}") from error
    return outcomes, BatchReport(
        device=runner.device,
        size=len(batch),
        padding=runner.launch_size(len(batch)) - len(batch),
        release=release,
        inference_seconds=clock() - launched,
    )


def _predict(
    runner: ModelRunner, batch: Sequence[Waiting], launched: float, clock: Callable[[], float]
) -> list[Outcome]:
    requests = [entry.item for entry in batch]
    outputs = runner.predict([each.pixels for each in requests], [each.requested for each in requests])
    seconds = clock() - launched
    return [
        InferenceResult(each, len(batch), launched - entry.arrived, seconds)
        if each.finite
        else InferenceFailed("the model gave no finite score for this image")
        for each, entry in zip(outputs, batch, strict=True)
    ]


def _predict_alone(runner: ModelRunner, entry: Waiting, launched: float, clock: Callable[[], float]) -> Outcome:
    """Compute one image of a batch that failed: only the images that fail alone are at fault."""
    try:
        return _predict(runner, [entry], launched, clock)[0]
    except (RuntimeError, ValueError, MemoryError) as error:
        logger.error("an image failed alone: %s", error)
        if isinstance(error, CheckpointChanged):
            return InferenceFailed("this output needs the checkpoint's files, which changed since they were loaded")
        return InferenceFailed("the model failed on this image")
