"""`LocalEngine` runs the model on threads of this process.

    event loop                      engine threads, one a stream
    ----------                      ----------------------------
    submit() --> BatchQueue.put --> poll -> predict -> results
         ^                                               |
         +---- one call_soon_threadsafe a batch ---------+

Every submitted image gets exactly one outcome: its result, an error of its own, or cancellation.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

import numpy as np

from model.errors import VitError
from model.prediction import BatchPrediction
from service.engine.base import ModelRunner
from service.engine.batching import BatchQueue, Entry, Poll
from service.engine.messages import (
    BatchReport,
    EngineStatus,
    InferenceRequest,
    InferenceResult,
    ModelInfo,
)
from service.errors import DeadlineExceeded, EngineUnavailable, InferenceFailed, ServiceError

logger = logging.getLogger(__name__)

Outcome = InferenceResult | ServiceError


class _Pending:
    """A request in the queue and the future that its caller awaits."""

    __slots__ = ("future", "request")

    def __init__(self, request: InferenceRequest, future: asyncio.Future[InferenceResult]) -> None:
        self.request = request
        self.future = future


class LocalEngine:
    """A thread of this process owns the predictor: it loads it, warms it up and runs batches.

    Where the predictor offers several streams, each beyond the first gets one more thread that takes
    batches from the same queue; the first failure ends them all.

    Args:
        load: builds the predictor and says what was loaded; called on the engine's thread.
        device: what the status says until the predictor is there.
        queue_size, max_delay: see `BatchQueue`.
        on_batch: told of every launch, on the event loop; for metrics.
        on_queue: told how many images wait, whenever that changes, on any thread.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        load: Callable[[], tuple[ModelRunner, ModelInfo]],
        *,
        device: str,
        queue_size: int,
        max_delay: float,
        on_batch: Callable[[BatchReport], None],
        on_queue: Callable[[int], None] = lambda depth: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info: ModelInfo | None = None
        self._load = load
        self._device = device
        self._queue_size = queue_size
        self._max_delay = max_delay
        self._on_batch = on_batch
        self._on_queue = on_queue
        self._clock = clock
        self._state: Literal["loading", "ready", "failed", "closed"] = "loading"
        self._reason = "the model is loading"
        self._wake = threading.Condition()
        self._queue: BatchQueue[_Pending] | None = None
        self._predictor: ModelRunner | None = None
        self._closing = False
        self._on_change: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def status(self) -> EngineStatus:
        """How it is doing right now."""
        predictor, queue = self._predictor, self._queue
        return EngineStatus(
            device=predictor.device if predictor else self._device,
            state=self._state,
            reason=self._reason,
            compiled=predictor.compiled if predictor else "",
            batch_sizes=predictor.batch_sizes if predictor else None,
            queue_depth=len(queue) if queue is not None else 0,
        )

    @property
    def ready(self) -> bool:
        """Whether it takes images."""
        return self._state == "ready"

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading on the engine's thread."""
        self._loop = asyncio.get_running_loop()
        self._on_change = on_change
        self._thread.start()

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """See `Engine.infer`."""
        if self._state != "ready" or self._queue is None:
            raise EngineUnavailable(self._reason)
        future: asyncio.Future[InferenceResult] = self._loop.create_future()
        with self._wake:
            entry = self._queue.put(_Pending(request, future), deadline=self._clock() + timeout)
            self._on_queue(len(self._queue))
            self._wake.notify()
        timer = self._loop.call_later(timeout, self._expire, entry)
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(entry)
            raise
        finally:
            timer.cancel()

    async def close(self) -> None:
        """Finish the running batch; what still waits is answered `EngineUnavailable`."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    # The event loop's side.

    def _expire(self, entry: Entry[_Pending]) -> None:
        """The time is up: if it is still waiting it will never be launched, and its caller hears now."""
        if self._cancel(entry):
            self._deliver([(entry.item, DeadlineExceeded("the image was not launched in time"))])

    def _cancel(self, entry: Entry[_Pending]) -> bool:
        assert self._queue is not None
        with self._wake:
            waiting = self._queue.cancel(entry)
            self._on_queue(len(self._queue))
        return waiting

    def _deliver(self, outcomes: list[tuple[_Pending, Outcome]], report: BatchReport | None = None) -> None:
        for pending, outcome in outcomes:
            if pending.future.done():  # its caller went away after the launch
                continue
            if isinstance(outcome, InferenceResult):
                pending.future.set_result(outcome)
            else:
                pending.future.set_exception(outcome)
        if report is not None:
            self._on_batch(report)

    def _change(
        self, state: Literal["loading", "ready", "failed", "closed"], reason: str, info: ModelInfo | None
    ) -> None:
        self._state, self._reason, self.info = state, reason, info
        self._on_change()

    # The engine thread's side.

    def _run(self) -> None:
        reason = "the engine stopped"
        state: Literal["failed", "closed"] = "failed"
        try:
            self._predictor, info = self._load()
            self._predictor.warm_up()
            self._queue = BatchQueue(
                capacity=self._queue_size,
                max_batch=self._predictor.max_batch,
                max_delay=self._max_delay,
                clock=self._clock,
            )
            self._call_loop(self._change, "ready", "", info)
            self._serve_streams(self._predictor, self._queue)
            reason, state = "the engine is closed", "closed"
        except (VitError, EngineUnavailable) as error:
            reason = _reason(error)
        except BaseException as error:
            # Nobody may wait for a thread that is no more: say so below, and let the traceback be seen.
            reason = _reason(error)
            raise
        finally:
            if state == "failed":
                logger.critical("engine %s: %s", self._device, reason)
            with self._wake:  # an image that is just being put is either refused or handed back here
                left = self._queue.close() if self._queue is not None else []
                self._on_queue(0)
            outcomes: list[tuple[_Pending, Outcome]] = [(entry.item, EngineUnavailable(reason)) for entry in left]
            self._call_loop(self._deliver, outcomes)
            self._call_loop(self._change, state, reason, self.info)

    def _serve_streams(self, predictor: ModelRunner, queue: BatchQueue[_Pending]) -> None:
        failures: list[BaseException] = []

        def serve() -> None:
            try:
                self._serve(predictor, queue)
            except BaseException as error:
                failures.append(error)
                with self._wake:
                    self._closing = True
                    self._wake.notify_all()
                if threading.current_thread() is not self._thread and not isinstance(error, EngineUnavailable):
                    raise  # its traceback is seen here, its reason below

        others = [
            threading.Thread(target=serve, name=f"engine-{number}", daemon=True)
            for number in range(1, predictor.streams)
        ]
        for thread in others:
            thread.start()
        serve()
        for thread in others:
            thread.join()
        if failures:
            raise failures[0]

    def _serve(self, predictor: ModelRunner, queue: BatchQueue[_Pending]) -> None:
        while (poll := self._next(queue)) is not None:
            launched = self._clock()
            outcomes: list[tuple[_Pending, Outcome]] = [
                (entry.item, DeadlineExceeded("the image was not launched in time")) for entry in poll.expired
            ]
            report: BatchReport | None = None
            try:
                if poll.batch:
                    results, report = self._launch(predictor, poll, launched)
                    outcomes += results
            except BaseException as error:
                # Whatever ends the engine, those that were on board hear of it.
                outcomes += [(entry.item, EngineUnavailable(_reason(error))) for entry in poll.batch]
                raise
            finally:
                self._call_loop(self._deliver, outcomes, report)

    def _next(self, queue: BatchQueue[_Pending]) -> Poll[_Pending] | None:
        """What to do next, as soon as there is something; None when the engine is to close."""
        with self._wake:
            while not self._closing:
                poll = queue.poll()
                if poll.batch or poll.expired:
                    self._on_queue(len(queue))
                    return poll
                self._wake.wait(poll.wait)
        return None

    def _launch(
        self, predictor: ModelRunner, poll: Poll[_Pending], launched: float
    ) -> tuple[list[tuple[_Pending, Outcome]], BatchReport]:
        """One batch, each of its images with an outcome.

        Raises:
            EngineUnavailable: the device no longer computes.
        """
        batch = poll.batch
        outcomes: list[tuple[_Pending, Outcome]]
        try:
            prediction = self._predict(predictor, batch)
        except (RuntimeError, ValueError, MemoryError) as error:
            logger.warning("a batch of %d failed, trying its images one by one: %s", len(batch), error)
            outcomes = self._one_by_one(predictor, batch, launched)
        else:
            seconds = self._clock() - launched
            outcomes = [
                (entry.item, self._outcome(entry, prediction, row, len(batch), launched, seconds))
                for row, entry in enumerate(batch)
            ]
        if all(isinstance(outcome, InferenceFailed) for _, outcome in outcomes):
            # Nothing went through. If an empty image does not either, the device is gone, and so is the engine.
            try:
                predictor.check()
            except VitError as error:
                raise EngineUnavailable(f"the device failed: {error}") from error
        report = BatchReport(
            device=predictor.device,
            size=len(batch),
            padding=predictor.launch_size(len(batch)) - len(batch),
            release=poll.release,
            inference_seconds=self._clock() - launched,
        )
        return outcomes, report

    def _one_by_one(
        self, predictor: ModelRunner, batch: list[Entry[_Pending]], launched: float
    ) -> list[tuple[_Pending, Outcome]]:
        """A batch failed: only the images that fail alone are at fault, unless the device is."""
        outcomes: list[tuple[_Pending, Outcome]] = []
        for entry in batch:
            try:
                prediction = self._predict(predictor, [entry])
            except (RuntimeError, ValueError, MemoryError) as error:
                outcomes.append((entry.item, InferenceFailed("the model failed on this image")))
                logger.error("an image failed alone: %s", error)
            else:
                seconds = self._clock() - launched
                outcomes.append((entry.item, self._outcome(entry, prediction, 0, 1, launched, seconds)))
        return outcomes

    @staticmethod
    def _predict(predictor: ModelRunner, batch: list[Entry[_Pending]]) -> BatchPrediction:
        requests = [entry.item.request for entry in batch]
        maps = [request.map for request in requests]
        return predictor.predict(
            np.stack([request.pixels for request in requests]),
            top_k=max(request.top_k for request in requests),
            maps=maps if any(maps) else (),
        )

    @staticmethod
    def _outcome(
        entry: Entry[_Pending], prediction: BatchPrediction, row: int, size: int, launched: float, seconds: float
    ) -> Outcome:
        if not prediction.finite[row]:
            return InferenceFailed("the model gave no finite score for this image")
        top_k = entry.item.request.top_k
        return InferenceResult(
            scores=prediction.scores[row, :top_k],
            indices=prediction.indices[row, :top_k],
            map=prediction.maps[row],
            batch_size=size,
            queue_seconds=launched - entry.arrived,
            inference_seconds=seconds,
        )

    def _call_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed: the process is ending and nobody waits any more.
            logger.debug("the event loop is closed")


def _reason(error: BaseException) -> str:
    """Why an engine ended: errors of ours speak for themselves, others need their type's name."""
    return str(error) if isinstance(error, VitError | ServiceError) else f"{type(error).__name__}: {error}"
