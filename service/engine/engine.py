"""The engine of one backbone, on threads of this process.

    event loop                      engine threads, one per stream
    ----------                      ----------------------------
    infer() --> BatchQueue.put ---> poll -> launch -> outcomes
       ^                                              |
       +----- one call_soon_threadsafe per batch -----+

Every queued image gets exactly one outcome, see `PendingImages`. A batch that computes longer than
`batch_seconds` fails the engine, even if its thread never comes back.
"""

import asyncio
import gc
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, Self

from model.errors import VitError
from service.background import keep_running
from service.engine.interface import ModelRunner
from service.engine.messages import (
    BatchReport,
    EngineState,
    EngineStatus,
    InferenceRequest,
    InferenceResult,
    ModelInfo,
)
from service.engine.streams import Outcome, Streams, Waiting, reason_of
from service.engine.texts import Floats, TextFeatures
from service.errors import DeadlineExceeded, EngineUnavailable, InferenceFailed, ServiceError

logger = logging.getLogger(__name__)

# Takes the outcome of an image, on the event loop.
Answer = Callable[[Outcome], None]

BATCH_SECONDS: Final = 30.0
"""Longest computation of one batch; after it, the device counts as hung."""

# Share of these seconds after which the service is not ready, so that load balancers send requests
# elsewhere before the device counts as hung.
_STALL_SHARE: Final = 1 / 3


class LocalEngine:
    """Runs a model on a thread of this process, which loads it, warms it up and launches batches.

    A runner with several streams gets one more thread for each further stream; maps have a queue
    and a thread of their own, see `Streams`. The first failure ends all threads.

    Args:
        load: builds the runner and describes the model, on the engine's thread; returns None if
            the engine is not needed any more.
        device: device in the status until the runner is loaded.
        queue_size: see `Streams`.
        max_delay: see `Streams`.
        on_batch: called on the event loop with the report of every launch, for metrics.
        batch_seconds: see `BATCH_SECONDS`.
        clock: see `Streams`.

    Attributes:
        info: description of the model; None before it is loaded.
        runner: the model; None before it is loaded, and after the engine has ended.
        failure: the error that ended the engine, if it is an error of ours.
    """

    def __init__(
        self,
        load: Callable[[], tuple[ModelRunner, ModelInfo] | None],
        *,
        device: str,
        queue_size: int,
        max_delay: float,
        on_batch: Callable[[BatchReport], None],
        batch_seconds: float = BATCH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info: ModelInfo | None = None
        self.runner: ModelRunner | None = None
        self.failure: VitError | EngineUnavailable | None = None
        self._load = load
        self._device = device
        self._batch_seconds = batch_seconds
        self._state: EngineState = "loading"
        self._reason = "the model is loading"
        self._batch_age_seconds = 0.0
        self._watching: asyncio.Task[None] | None = None
        self._streams = Streams(
            queue_size=queue_size,
            max_delay=max_delay,
            deliver=lambda *batch: self._call_loop(self._pending.deliver, *batch),
            clock=clock,
        )
        self._pending = PendingImages(self._streams.cancel, on_batch)
        self._texts = TextFeatures()
        self._on_change: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def engines(self) -> tuple[Self]:
        """Return this engine alone: a single engine is its own group."""
        return (self,)

    @property
    def status(self) -> EngineStatus:
        """Return the engine's current status."""
        runner = self.runner
        status = EngineStatus(
            device=self._device,
            state=self._state,
            reason=self._reason_not_ready(),
            compiled="",
            batch_sizes=None,
            queue_depth=len(self._streams),
        )
        if runner is None:
            return status
        return replace(
            status,
            device=runner.device,
            compiled=runner.compiled,
            batch_sizes=runner.batch_sizes,
        )

    @property
    def ready(self) -> bool:
        """Return whether the engine takes images."""
        return self._state == "ready"

    @property
    def size(self) -> int:
        """Return the measured bytes of the model; 0 before it is loaded."""
        return 0 if self.runner is None else self.runner.size

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading on the engine's thread; `on_change` is called on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._on_change = on_change
        self._thread.start()
        self._watching = keep_running("batch-watch", self._watch_batches)

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """Return one image's result; see `Engine.infer`."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def settle(outcome: Outcome) -> None:
            if not future.done():  # otherwise the caller has left
                future.set_result(outcome)

        cancel = self.submit(request, timeout, settle)
        try:
            outcome = await future
        except asyncio.CancelledError:
            cancel()
            raise
        if isinstance(outcome, ServiceError):
            raise outcome
        return outcome

    def submit(
        self, request: InferenceRequest, timeout: float, answer: Answer
    ) -> Callable[[], None]:
        """Queue an image to be launched within `timeout` seconds, and return a function to cancel.

        Args:
            answer: called once on the event loop, with the outcome of the image.

        Raises:
            EngineUnavailable, QueueFull: as `Engine.infer`; `answer` is not called.
        """
        if not self.ready:
            raise EngineUnavailable(self._reason)
        entry = self._streams.put(request, timeout)
        self._pending.add(entry, timeout, answer)
        return partial(self._pending.withdraw, entry, InferenceFailed, "the caller has left")

    async def embed_texts(self, texts: Sequence[str], *, timeout: float) -> Floats:
        """Return the features of texts; see `Engine.embed_texts`."""
        if self.runner is None or not self.ready:
            raise EngineUnavailable(self._reason)
        return await self._texts.embed(texts, self.runner.embed_texts, timeout=timeout)

    async def close(self) -> None:
        """Finish the running batches, and answer `EngineUnavailable` for waiting images.

        This does not wait for a model that is still loading; its thread drops the model afterwards.
        """
        self._streams.stop()
        if self._state == "loading":
            self._change("closed", "the engine is closed")
        elif self._thread.is_alive() and self._state == "ready":
            await asyncio.to_thread(self._thread.join)

    # The event loop's side

    def _reason_not_ready(self) -> str:
        """Return why the engine is not ready, or may not be soon; else an empty text."""
        runner = self.runner
        if self._state == "loading" and runner and runner.compiled.startswith("compiling"):
            return "the model is being compiled; without cached kernels that takes minutes"
        age_seconds = self._batch_age_seconds
        if self._state == "ready" and age_seconds > self._batch_seconds * _STALL_SHARE:
            return f"a batch has computed for {age_seconds:.0f} s: the device may hang"
        return self._reason

    async def _watch_batches(self) -> None:
        """Watch the batches until the engine has ended; fail it if one computes for too long."""
        seconds = min(1.0, self._batch_seconds / 4)
        while self._state not in ("failed", "closed"):
            self._batch_age_seconds = self._streams.age_batches(seconds)
            if self._batch_age_seconds > self._batch_seconds:
                self._streams.stop()
                reason = (
                    f"a batch computed for more than {self._batch_seconds:g} s: the device hangs"
                )
                self._end("failed", reason)
                return
            await asyncio.sleep(seconds)

    def _end(self, state: EngineState, reason: str) -> None:
        """Fail the waiting images, and refuse new ones."""
        self._pending.fail(reason)
        self._change(state, reason)

    def _change(self, state: EngineState, reason: str, info: ModelInfo | None = None) -> None:
        if self._state in ("failed", "closed"):  # a hung or abandoned thread came back
            return
        self._state = state
        self._reason = reason
        self.info = info or self.info
        if state != "ready":
            self._texts.close()
            if self._watching is not None:
                self._watching.cancel()
        self._on_change()

    # The engine thread's side

    def _run(self) -> None:
        state: EngineState = "failed"
        reason = "the engine stopped"
        try:
            loaded = self._load()
            if loaded is not None and self._state == "loading":
                self.runner, info = loaded
                del loaded  # so that only `runner` refers to the model
                self.runner.warm_up(compile_later=True)
                self._call_loop(self._change, "ready", "", info)
                self._streams.run(self.runner)
            state = "closed"
            reason = "the engine is closed"
        except (VitError, EngineUnavailable) as error:
            self.failure = error
            reason = reason_of(error)
            _clear_frames(error)
            gc.collect()  # parts of a model refer to each other, and the collector runs seldom here
        except BaseException as error:
            # Tell the waiting requests, below, and let the thread's traceback be printed.
            reason = reason_of(error)
            raise
        finally:
            # Release the model with this thread, even if the engine is still referenced.
            self._device = self.status.device
            self.runner = None
            self._streams.close()  # refuses new images; `_end` fails the queued ones
            self._call_loop(self._end, state, reason)

    def _call_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed because the process ends, and no request waits any more.
            logger.debug("the event loop is closed")


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and of its causes: they may hold a whole model."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _PendingImage(NamedTuple):
    answer: Answer
    expires: float


class PendingImages:
    """The queued and launched images of one engine, with the functions that take their outcomes.

    Every image gets exactly one outcome: its own result or error. A timer of the event
    loop ends an image at its deadline, even if all threads are busy, and the queue does not launch
    it later. The images share one timer, because a timer for each takes 3 us.

    Args:
        cancel: takes an image out of its queue.
        on_batch: called with the report of every launch, for metrics.
    """

    def __init__(
        self, cancel: Callable[[Waiting], None], on_batch: Callable[[BatchReport], None]
    ) -> None:
        self._cancel = cancel
        self._on_batch = on_batch
        self._images: dict[Waiting, _PendingImage] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_expiry = math.inf

    def add(self, entry: Waiting, timeout: float, answer: Answer) -> None:
        """Take a queued image, to be launched within `timeout` seconds."""
        expires = asyncio.get_running_loop().time() + timeout
        self._images[entry] = _PendingImage(answer, expires)
        if expires < self._next_expiry:
            self._wake_at(expires)

    def deliver(
        self, outcomes: Iterable[tuple[Waiting, Outcome]], report: BatchReport | None = None
    ) -> None:
        """Give each image its outcome, unless it has one."""
        for entry, outcome in outcomes:
            image = self._images.pop(entry, None)
            if image is not None:
                image.answer(outcome)
        if report is not None:
            self._on_batch(report)

    def withdraw(self, entry: Waiting, error: type[ServiceError], reason: str) -> None:
        """Answer with an error for an image, and do not launch it; no effect after its launch."""
        self._cancel(entry)
        if not entry.launched:
            self.deliver([(entry, error(reason))])

    def fail(self, reason: str) -> None:
        """Answer `EngineUnavailable` for all images."""
        self.deliver([(entry, EngineUnavailable(reason)) for entry in list(self._images)])

    def _expire(self) -> None:
        """Answer for the images whose time is up, and wait for the next deadline."""
        now = asyncio.get_running_loop().time()
        for entry, image in list(self._images.items()):
            if image.expires <= now:
                self.withdraw(entry, DeadlineExceeded, "the image was not launched in time")
        waiting = (image.expires for entry, image in self._images.items() if not entry.launched)
        self._wake_at(min(waiting, default=math.inf))

    def _wake_at(self, seconds: float) -> None:
        self._next_expiry = seconds
        if self._timer is not None:
            self._timer.cancel()
        if seconds < math.inf:
            # A timer has the resolution of a millisecond, and must not come too early.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(seconds + 0.001, self._expire)
