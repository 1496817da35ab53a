"""The threads of an engine: each stream takes the next batch from a shared queue, and launches it.

Every launched image gets an outcome. An image on which the model fails, fails alone.

Maps that need a pass of their own have their own queue and thread, so that classification goes
first. A batch of maps is launched when no other image waits, or when the maps have waited for long.
Images for which the runner must first load something, such as torch, go there, too.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from model.errors import CheckpointChanged, VitError
from model.outputs import RequestedOutputs
from service.engine.batching import BatchQueue, Poll, QueuedItem
from service.engine.interface import ModelRunner
from service.engine.messages import BatchReport, InferenceRequest, InferenceResult, Release
from service.errors import EngineUnavailable, InferenceFailed, ServiceError

logger = logging.getLogger(__name__)

MAX_EXPLANATION_BATCH: Final = 8
"""Largest batch of maps, so that it does not hold the device for long."""

EXPLANATION_SECONDS: Final = 0.1
"""Longest batch of several maps, because on a CPU it competes with classification."""

MAX_EXPLANATION_WAIT: Final = 1.0
"""Seconds that maps wait for classification, which may never pause."""

Outcome = InferenceResult | ServiceError

# An image that is, or was, in a queue.
Waiting = QueuedItem[InferenceRequest]

Deliver = Callable[[Iterable[tuple[Waiting, Outcome]], BatchReport | None], None]


class _WatchedQueue(NamedTuple):
    """A queue, and the condition that its threads wait for; all of them share a lock."""

    queue: BatchQueue[InferenceRequest]
    wake: threading.Condition


class Streams:
    """Two batch queues behind a lock, with a thread for each stream and a thread for maps.

    Each queue has its own condition: waking the thread of maps for each classified image would cost
    a request two switches of threads.

    Args:
        queue_size: capacity of each queue, see `BatchQueue`.
        max_delay: see `BatchQueue`; maps are never delayed.
        deliver: called on a stream's thread after each launch, with each image's outcome and the
            report of the launch, or None if the launch ended the engine.
        clock: see `BatchQueue`.
    """

    def __init__(
        self, *, queue_size: int, max_delay: float, deliver: Deliver, clock: Callable[[], float]
    ) -> None:
        self._lock = threading.Lock()
        self._images = _WatchedQueue(
            BatchQueue(capacity=queue_size, max_delay=max_delay, clock=clock),
            threading.Condition(self._lock),
        )
        self._maps = _WatchedQueue(
            BatchQueue(capacity=queue_size, max_delay=0.0, clock=clock),
            threading.Condition(self._lock),
        )
        self._deliver = deliver
        self._clock = clock
        self._stopping = False
        self._defers: Callable[[RequestedOutputs], bool] = lambda _: False
        self._under_way: dict[int, float] = {}
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        """Return the number of waiting images."""
        return len(self._images.queue) + len(self._maps.queue)

    def put(self, request: InferenceRequest, timeout: float) -> Waiting:
        """Queue an image, to be launched within `timeout` seconds; raises as `BatchQueue.put`."""
        requested = request.requested
        with self._lock:
            is_slow = not requested.is_plain and (requested.needs_pass or self._defers(requested))
            watched = self._maps if is_slow else self._images
            entry = watched.queue.put(request, deadline=self._clock() + timeout)
            watched.wake.notify()
        return entry

    def cancel(self, entry: Waiting) -> None:
        """Take an image out of its queue; no effect once it was launched."""
        with self._lock:
            for watched in (self._images, self._maps):
                watched.queue.cancel(entry)

    def age_batches(self, seconds: float) -> float:
        """Add the seconds since the last call to the age of each running batch; return the largest.

        Seconds in which this process, or the machine, was suspended do not count.
        """
        with self._lock:
            self._under_way = {
                thread: looked + seconds for thread, looked in self._under_way.items()
            }
            return max(self._under_way.values(), default=0.0)

    def run(self, runner: ModelRunner) -> None:
        """Launch batches until `stop`.

        This thread is one stream; each further stream and the maps have a thread. One more thread
        finishes the warm-up meanwhile, and `stop` does not wait for it.

        The error of the first thread that fails ends the others, and is raised here.
        """
        self._defers = runner.defers
        maps = min(runner.max_batch, MAX_EXPLANATION_BATCH)
        work = [
            (self._images, runner.max_batch, f"engine-{number}")
            for number in range(1, runner.streams)
        ]
        others = [
            threading.Thread(
                target=self._launch_all, args=(runner, watched, max_batch), name=name, daemon=True
            )
            for watched, max_batch, name in [*work, (self._maps, maps, "engine-maps")]
        ]
        for thread in others:
            thread.start()
        threading.Thread(
            target=self._finish_warm_up, args=(runner,), name="engine-compile", daemon=True
        ).start()
        self._launch_all(runner, self._images, runner.max_batch)
        for thread in others:
            thread.join()
        self._defers = lambda _: False  # drop the reference to the model
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End each stream after its current batch; waiting images stay in the queue."""
        with self._lock:
            self._stopping = True
            self._images.wake.notify_all()
            self._maps.wake.notify_all()

    def close(self) -> None:
        """Refuse new images, and drop the waiting ones."""
        with self._lock:
            self._images.queue.close()
            self._maps.queue.close()

    def _launch_all(self, runner: ModelRunner, watched: _WatchedQueue, max_batch: int) -> None:
        batch: list[Waiting] = []
        most = max_batch
        try:
            while (poll := self._next(watched, most)) is not None:
                batch = poll.batch
                began = self._clock()
                outcomes, report = launch(runner, batch, poll.release, self._clock)
                self._deliver(list(zip(batch, outcomes, strict=True)), report)
                if watched is self._maps:
                    took = max(self._clock() - began, 1e-9)
                    most = max(1, min(max_batch, int(len(batch) * EXPLANATION_SECONDS / took)))
        except BaseException as error:  # noqa: BLE001  raised by `run`
            # Whatever ends the engine, the images of this batch get an error.
            self._deliver([(entry, EngineUnavailable(reason_of(error))) for entry in batch], None)
            self._failure = self._failure or error
            self.stop()

    def _finish_warm_up(self, runner: ModelRunner) -> None:
        try:
            runner.finish_warm_up()
        except BaseException as error:  # noqa: BLE001  raised by `run`
            self._failure = self._failure or error
            self.stop()

    def _next(self, watched: _WatchedQueue, max_batch: int) -> Poll[InferenceRequest] | None:
        """Wait for the next batch of a queue and return it, or None if the stream should end."""
        thread = threading.get_ident()
        with self._lock:
            self._under_way.pop(thread, None)
            while not self._stopping:
                if watched is self._maps and len(watched.queue):
                    watched.wake.wait_for(
                        lambda: self._stopping or not len(self._images.queue), MAX_EXPLANATION_WAIT
                    )
                    if self._stopping:
                        break
                poll = watched.queue.poll(max_batch)
                if watched is self._images and len(self._maps.queue) and not len(watched.queue):
                    self._maps.wake.notify()
                if poll.batch:
                    self._under_way[thread] = 0.0
                    return poll
                watched.wake.wait(poll.wait)
        return None


def reason_of(error: BaseException) -> str:
    """Return why an engine ended: the message of an error of ours, or type and message."""
    if isinstance(error, VitError | ServiceError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def launch(
    runner: ModelRunner, batch: Sequence[Waiting], release: Release, clock: Callable[[], float]
) -> tuple[list[Outcome], BatchReport]:
    """Compute a batch, or its images one by one if the batch fails and the device still works.

    Args:
        runner: model to run.
        batch: one to `runner.max_batch` images.
        release: why the batch is launched.
        clock: monotonic seconds, the same clock as the queue's.

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
        _require_device(runner)  # on a lost device each image could hang
        outcomes = [_predict_alone(runner, entry, launched, clock) for entry in batch]
    else:
        if all(isinstance(outcome, InferenceFailed) for outcome in outcomes):
            _require_device(runner)
    return outcomes, BatchReport(
        device=runner.device,
        size=len(batch),
        padding=runner.launch_size(len(batch)) - len(batch),
        release=release,
    )


def _predict(
    runner: ModelRunner, batch: Sequence[Waiting], launched: float, clock: Callable[[], float]
) -> list[Outcome]:
    requests = [entry.item for entry in batch]
    outputs = runner.predict(
        [request.pixels for request in requests], [request.requested for request in requests]
    )
    seconds = clock() - launched
    outcomes: list[Outcome] = []
    for output, entry in zip(outputs, batch, strict=True):
        if output.finite:
            queue_seconds = launched - entry.arrived
            outcomes.append(InferenceResult(output, len(batch), queue_seconds, seconds))
        else:
            outcomes.append(InferenceFailed("the model's scores for this image are not finite"))
    return outcomes


def _require_device(runner: ModelRunner) -> None:
    """Raise `EngineUnavailable`, which ends the engine, if an empty image fails, too."""
    try:
        runner.check()
    except VitError as error:
        raise EngineUnavailable(f"the device failed: {error}") from error


def _predict_alone(
    runner: ModelRunner, entry: Waiting, launched: float, clock: Callable[[], float]
) -> Outcome:
    """Compute one image of a failed batch; only images that fail alone are at fault.

    Raises:
        EngineUnavailable: the device no longer computes.
    """
    try:
        return _predict(runner, [entry], launched, clock)[0]
    except (RuntimeError, ValueError, MemoryError) as error:
        logger.error("an image failed alone: %s", error)
        if isinstance(error, CheckpointChanged):
            return InferenceFailed(
                "this output needs the checkpoint's files, which changed since they were loaded"
            )
        _require_device(runner)
        return InferenceFailed("the model failed on this image")
