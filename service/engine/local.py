"""`LocalEngine` runs the model on threads of this process.

    event loop                      engine threads, one a stream
    ----------                      ----------------------------
    infer() --> BatchQueue.put ---> poll -> launch -> outcomes
       ^                                              |
       +------ one call_soon_threadsafe a batch ------+

Every image that is put gets exactly one outcome: its result, an error of its own, or cancellation. The nearest deadline
is a timer of the event loop, which answers however busy the threads are; the queue launches nothing later. A batch
that computes longer than `batch_timeout` fails the engine, though its thread never comes back; so does a model that
loads longer than `load_timeout`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Self

from model.errors import VitError
from service.engine.base import ModelRunner
from service.engine.batching import State
from service.engine.messages import BatchReport, EngineState, EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.engine.streams import Outcome, Streams, Waiting, reason_of
from service.engine.texts import Floats, TextFeatures
from service.errors import DeadlineExceeded, EngineUnavailable
from service.timers import Timers

logger = logging.getLogger(__name__)


class LocalEngine:
    """Runs a model on a thread of this process, which loads it, warms it up and launches batches.

    Where the runner offers several streams, each beyond the first gets one more thread that takes
    batches from the same queue; the first failure ends them all.

    Args:
        load: builds the runner and says what was loaded; called on the engine's thread.
        device: what the status says until the runner is there.
        batch_timeout: seconds that one batch may compute.
        load_timeout: seconds that the model may load and warm up beside another that serves, and whose owner then
            says why it is not swapped; None: no other model serves, and loading may take any time.
        on_batch: called with the report of every launch, on the event loop; for metrics.
        queue_size, max_delay, on_queue, clock: see `Streams`.

    Attributes:
        failure: what ended the engine, where that is an error of ours.
    """

    def __init__(
        self,
        load: Callable[[], tuple[ModelRunner, ModelInfo]],
        *,
        device: str,
        queue_size: int,
        max_delay: float,
        on_batch: Callable[[BatchReport], None],
        batch_timeout: float = math.inf,
        load_timeout: float | None = None,
        on_queue: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info: ModelInfo | None = None
        self.failure: VitError | EngineUnavailable | None = None
        self._load = load
        self._device = device
        self._on_batch = on_batch
        self._batch_timeout = batch_timeout
        self._load_timeout = load_timeout
        self._hung = False
        self._state: EngineState = "loading"
        self._reason = "the model is loading"
        self._runner: ModelRunner | None = None
        self._callers: dict[Waiting, Callable[[Outcome], None]] = {}
        self._timers = Timers()
        self._streams = Streams(
            queue_size=queue_size,
            max_delay=max_delay,
            deliver=lambda outcomes, report: self._call_loop(self._deliver, outcomes, report),
            on_queue=on_queue or (lambda depth: None),
            clock=clock,
        )
        self._texts = TextFeatures(self._texts_of_runner)
        self._on_change: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def engines(self) -> tuple[Self]:
        """Return this engine: it is no group."""
        return (self,)

    @property
    def status(self) -> EngineStatus:
        """Return the engine's current status."""
        runner, reason = self._runner, self._reason
        if runner is not None and self._state == "loading" and runner.compiled.startswith("compiling"):
            reason = "the model is compiled, which takes minutes where the cache has no kernels of it"
        return EngineStatus(
            device=runner.device if runner else self._device,
            state=self._state,
            reason=reason,
            compiled=runner.compiled if runner else "",
            batch_sizes=runner.batch_sizes if runner else None,
            queue_depth=len(self._streams),
        )

    @property
    def ready(self) -> bool:
        """Return whether the engine takes images."""
        return self._state == "ready"

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading on the engine's thread; `on_change` is called on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._on_change = on_change
        self._thread.start()
        self._look_at_batches()
        if self._load_timeout is not None:
            self._loop.call_later(self._load_timeout, self._look_at_loading, self._load_timeout)

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """Return one image's result; see `Engine.infer`."""
        future: asyncio.Future[InferenceResult] = self._loop.create_future()

        def done(outcome: Outcome) -> None:
            if future.done():  # its caller went away
                return
            if isinstance(outcome, InferenceResult):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)

        entry = self.submit(request, timeout, done)
        try:
            return await future
        except asyncio.CancelledError:
            self.cancel(entry)
            raise

    def submit(self, request: InferenceRequest, timeout: float, done: Callable[[Outcome], None]) -> Waiting:
        """Take one image, without a task for it: `done` is called once, on the event loop, with its outcome.

        Raises:
            EngineUnavailable, QueueFull: see `Engine.infer`.
        """
        if not self.ready:
            raise EngineUnavailable(self._reason)
        entry = self._streams.put(request, timeout)
        self._callers[entry] = done
        self._timers.set(entry, timeout, partial(self._expire, entry))
        return entry

    def cancel(self, entry: Waiting) -> None:
        """Forget an image that nobody waits for; it is not launched if it was not yet."""
        self._callers.pop(entry, None)
        self._timers.clear(entry)
        self._streams.cancel(entry)

    async def embed_texts(self, texts: Sequence[str], *, timeout: float) -> Floats:
        """Return the features of texts; see `Engine.embed_texts`."""
        if not self.ready:
            raise EngineUnavailable(self._reason)
        return await self._texts.embed(texts, timeout=timeout)

    def _texts_of_runner(self, texts: Sequence[str]) -> Floats:
        runner = self._runner
        if runner is None:
            raise RuntimeError("the model is gone")
        return runner.embed_texts(texts)

    async def close(self) -> None:
        """Finish the running batches; what still waits is answered `EngineUnavailable`."""
        self._streams.stop()
        if self._thread.is_alive() and not self._hung:
            await asyncio.to_thread(self._thread.join)

    # The event loop's side.

    def _expire(self, entry: Waiting) -> None:
        """Answer a caller whose time is up, unless the image was launched; from now on it never will be."""
        self._streams.cancel(entry)
        if entry.state is not State.LAUNCHED:
            self._deliver([(entry, DeadlineExceeded("the image was not launched in time"))])

    def _deliver(self, outcomes: Iterable[tuple[Waiting, Outcome]], report: BatchReport | None = None) -> None:
        for entry, outcome in outcomes:
            self._timers.clear(entry)
            done = self._callers.pop(entry, None)
            if done is not None:  # else its caller went away, or was answered already
                try:
                    done(outcome)
                except Exception:  # a defect costs its own image alone
                    logger.exception("an image's outcome reached nobody")
        if report is not None:
            self._on_batch(report)

    def _look_at_batches(self) -> None:
        """Fail the engine if a batch has computed for too long; else look again soon."""
        if self._state in ("failed", "closed"):
            return
        if self._streams.computing_seconds() <= self._batch_timeout:
            self._loop.call_later(min(1.0, self._batch_timeout / 4), self._look_at_batches)
            return
        reason = f"a batch computed for more than {self._batch_timeout:g} s: the device hangs"
        logger.critical("engine %s: %s", self.status.device, reason)
        self._give_up(reason)

    def _look_at_loading(self, seconds: float) -> None:
        if self._state == "loading":
            self._give_up(f"the checkpoint was not loaded and warm within {seconds:g} s (VIT_LOAD_TIMEOUT)")

    def _give_up(self, reason: str) -> None:
        """Fail, and wait no more for the engine's thread."""
        self._hung = True
        self._streams.stop()
        self._deliver([(entry, EngineUnavailable(reason)) for entry in list(self._callers)])
        self._change("failed", reason)

    def _change(self, state: EngineState, reason: str, info: ModelInfo | None = None) -> None:
        if self._state == "failed":  # what hung came back after all
            return
        self._state, self._reason, self.info = state, reason, info or self.info
        if state != "ready":
            self._texts.close()
        self._on_change()

    # The engine thread's side.

    def _run(self) -> None:
        state: EngineState = "failed"
        reason, started = "the engine stopped", False
        try:
            self._runner, info = self._load()
            if not self._hung:
                self._runner.warm_up()
            started = True
            self._call_loop(self._change, "ready", "", info)
            self._streams.run(self._runner)
            state, reason = "closed", "the engine is closed"
        except (VitError, EngineUnavailable) as error:
            self.failure, reason = error, reason_of(error)
            _release(error)
            gc.collect()  # parts of a model refer to each other, and here the collector runs seldom
        except BaseException as error:
            # Nobody may wait for a thread that is no more: say so below, and let the traceback be seen.
            reason = reason_of(error)
            raise
        finally:
            if state == "failed" and (started or self._load_timeout is None):
                named = "" if self._device in ("auto", "cpu") else f" on {self._device}"
                what = f"engine {self.status.device}" if started else f"cannot start{named}"
                logger.critical("%s: %s", what, reason)
            # The model's memory is released with this thread, even if the engine is still referenced.
            self._device, self._runner = self.status.device, None
            # An image that is just being put is either refused or handed back here.
            left = [(entry, EngineUnavailable(reason)) for entry in self._streams.close()]
            self._call_loop(self._deliver, left)
            # What the queue found out of time waits for its timer, and nothing else does.
            self._call_loop(self._timers.ring)
            self._call_loop(self._change, state, reason)

    def _call_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed: the process is ending and nobody waits any more.
            logger.debug("the event loop is closed")


def _release(error: BaseException | None) -> None:
    """Clear the frames of an error and of those that led to it: they may hold a whole model, and the error lives on."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
