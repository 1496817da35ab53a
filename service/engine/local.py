"""The engines of this process: one for each backbone, whichever models share it.

    ModelEngine (a model's version) --+
    ModelEngine ----------------------+--> LocalEngine: one queue, one runner with a head for each

    event loop                      engine threads, one a stream
    ----------                      ----------------------------
    infer() --> BatchQueue.put ---> poll -> launch -> outcomes
       ^                                              |
       +------ one call_soon_threadsafe a batch ------+

Every image that is put gets exactly one outcome: its result, an error of its own, or cancellation.
Its deadline is a timer of the event loop, which answers however busy the threads are; the queue
launches nothing later. A batch that computes longer than `batch_seconds` fails the engine, though
its thread never comes back.

A model is loaded on a thread of its own engine. Where the loader gives a runner that another engine
has already, that engine answers for the model, too. The last model that leaves closes it.
`service.models.residency` decides which one is unloaded for others.
"""

import asyncio
import gc
import logging
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

from model.errors import VitError
from service.background import keep_running
from service.engine.base import ModelRunner
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
from service.errors import DeadlineExceeded, EngineUnavailable
from service.settings import Settings

logger = logging.getLogger(__name__)

# Seconds that one batch may compute; after them the device is taken for hung.
BATCH_SECONDS: Final = 30.0

# Share of these seconds after which the service is not ready: load balancers look away before the
# device is given up.
_STALL_SHARE: Final = 1 / 3

# What is loaded: None for what is configured, a checkpoint in its place, or all settings of one
# model.
What = str | Mapping[str, Any] | None

# Loads the model that the settings name onto their device.
Loader = Callable[[Settings], tuple[ModelRunner, ModelInfo]]


class HandedOver(Exception):
    """What was loaded is computed by an engine that runs already: this one ends."""


class LocalEngine:
    """Runs a model on a thread of this process, which loads it, warms it up and launches batches.

    Where the runner offers several streams, each beyond the first gets one more thread that takes
    batches from the same queue; the first failure ends them all.

    Args:
        load: builds the runner and describes what was loaded; called on the engine's thread.
        device: of the status until the runner is there.
        on_batch: called with the report of every launch, on the event loop; for metrics.
        batch_seconds: see `BATCH_SECONDS`.
        queue_size, max_delay, clock: see `Streams`.

    Attributes:
        info: the description of the model; None before it is loaded.
        runner: what it runs; None before that is loaded, and once it is gone.
        failure: the error that ended the engine, where it is an error of ours.
    """

    def __init__(
        self,
        load: Callable[[], tuple[ModelRunner, ModelInfo]],
        *,
        device: str,
        queue_size: int,
        max_delay: float,
        on_batch: Callable[[BatchReport], None],
        batch_seconds: float = BATCH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info: ModelInfo | None = None
        self.failure: VitError | EngineUnavailable | None = None
        self._load = load
        self._device = device
        self._on_batch = on_batch
        self._batch_seconds = batch_seconds
        self._state: EngineState = "loading"
        self._reason = "the model is loading"
        self._batch_age_seconds = 0.0
        self._watching: asyncio.Task[None] | None = None
        self.runner: ModelRunner | None = None
        self._callers: dict[Waiting, asyncio.Future[InferenceResult]] = {}
        deliver = partial(self._call_loop, self._deliver)
        self._streams = Streams(
            queue_size=queue_size, max_delay=max_delay, deliver=deliver, clock=clock
        )
        self._texts = TextFeatures()
        self._on_change: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def engines(self) -> tuple[Self]:
        """Return this engine: it is no group."""
        return (self,)

    @property
    def status(self) -> EngineStatus:
        """Return the engine's current status."""
        runner, reason = self.runner, self._reason
        if (
            runner is not None
            and self._state == "loading"
            and runner.compiled.startswith("compiling")
        ):
            reason = (
                "the model is compiled, which takes minutes where the cache has no kernels of it"
            )
        if self._state == "ready" and self._batch_age_seconds > self._batch_seconds * _STALL_SHARE:
            reason = (
                f"a batch has computed for {self._batch_age_seconds:.0f} s: the device may hang"
            )
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
        self._watching = keep_running("batch-watch", self._watch_batches)

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """Return one image's result; see `Engine.infer`."""
        if not self.ready:
            raise EngineUnavailable(self._reason)
        entry = self._streams.put(request, timeout)
        future: asyncio.Future[InferenceResult] = self._loop.create_future()
        self._callers[entry] = future
        timer = self._loop.call_later(timeout, self._expire, entry)
        try:
            return await future
        except asyncio.CancelledError:
            self._streams.cancel(entry)
            raise
        finally:
            timer.cancel()
            self._callers.pop(entry, None)

    async def embed_texts(self, texts: Sequence[str], *, timeout: float) -> Floats:
        """Return the features of texts; see `Engine.embed_texts`."""
        if self.runner is None or not self.ready:
            raise EngineUnavailable(self._reason)
        return await self._texts.embed(texts, self.runner.embed_texts, timeout=timeout)

    async def close(self) -> None:
        """Finish the running batches; what still waits is answered `EngineUnavailable`.

        A model that is still being loaded is not awaited: its thread lets go of it when it is
        loaded.
        """
        self._streams.stop()
        if self._state == "loading":
            self._change("closed", "the engine is closed")
        elif self._thread.is_alive() and self._state == "ready":
            await asyncio.to_thread(self._thread.join)

    # The event loop's side.

    def _expire(self, entry: Waiting) -> None:
        """Answer a caller whose time is up, unless the image was launched; from now on it never
        will be.
        """
        self._streams.cancel(entry)
        if not entry.launched:
            self._deliver([(entry, DeadlineExceeded("the image was not launched in time"))])

    def _deliver(
        self, outcomes: Iterable[tuple[Waiting, Outcome]], report: BatchReport | None = None
    ) -> None:
        for entry, outcome in outcomes:
            future = self._callers.get(entry)
            if future is None or future.done():  # its caller went away, or was answered already
                continue
            if isinstance(outcome, InferenceResult):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)
        if report is not None:
            self._on_batch(report)

    async def _watch_batches(self) -> None:
        """Look at the batches until the engine has ended; fail it if one has computed for too long."""
        seconds = min(1.0, self._batch_seconds / 4)
        while self._state not in ("failed", "closed"):
            self._batch_age_seconds = self._streams.look(seconds)
            if self._batch_age_seconds > self._batch_seconds:
                self._streams.stop()
                reason = (
                    f"a batch computed for more than {self._batch_seconds:g} s: the device hangs"
                )
                self._end("failed", reason)
                return
            await asyncio.sleep(seconds)

    def _end(self, state: EngineState, reason: str) -> None:
        """Answer whoever waits still, and take nothing more."""
        self._deliver([(entry, EngineUnavailable(reason)) for entry in list(self._callers)])
        self._change(state, reason)

    def _change(self, state: EngineState, reason: str, info: ModelInfo | None = None) -> None:
        if self._state in ("failed", "closed"):  # what hung, or was given up, came back after all
            return
        self._state, self._reason, self.info = state, reason, info or self.info
        if state != "ready":
            self._texts.close()
            if self._watching is not None:
                self._watching.cancel()
        self._on_change()

    # The engine thread's side.

    def _run(self) -> None:
        state: EngineState = "failed"
        reason = "the engine stopped"
        try:
            self.runner, info = self._load()
            if self._state == "loading":
                self.runner.warm_up(compile_later=True)
                self._call_loop(self._change, "ready", "", info)
                self._streams.run(self.runner)
            state, reason = "closed", "the engine is closed"
        except HandedOver:
            state, reason = "closed", "another engine has the model's backbone"
        except (VitError, EngineUnavailable) as error:
            self.failure, reason = error, reason_of(error)
            _release(error)
            gc.collect()  # parts of a model refer to each other, and here the collector runs seldom
        except BaseException as error:
            # Nobody may wait for a thread that is no more: say so below, and let the traceback be
            # seen.
            reason = reason_of(error)
            raise
        finally:
            # The model's memory is released with this thread, even if the engine is still
            # referenced.
            self._device, self.runner = self.status.device, None
            self._streams.close()  # whoever is just being put is refused; who was put is answered now
            self._call_loop(self._end, state, reason)

    def _call_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed: the process is ending and nobody waits any more.
            logger.debug("the event loop is closed")


class Backbones:
    """The backbones of this process, and how a further model joins them.

    Args:
        settings: of the process; a model's own take the place of theirs.
        load: called on an engine's thread.
        on_batch: see `LocalEngine`.

    Attributes:
        users: the engines that compute, and the models that each of them answers for; changed under
        `lock`.
    """

    def __init__(
        self, settings: Settings, load: Loader, on_batch: Callable[[BatchReport], None]
    ) -> None:
        self.settings, self.load = settings, load
        self.users: dict[LocalEngine, list[ModelEngine]] = {}
        self.lock = threading.Lock()
        self.on_batch = on_batch

    def engine(self, own: Mapping[str, Any]) -> "ModelEngine":
        """Return the engine of a model with settings of its own, not started yet."""
        return ModelEngine(self, self.settings.model_copy(update=dict(own)))

    def changed(self, engine: LocalEngine) -> None:
        """Tell the models of an engine that its state has changed."""
        for user in list(self.users.get(engine, ())):
            user.changed()


class ModelEngine:
    """The engine of one model, which may be that of others as well; see
    `service.engine.base.Engine`.

    Attributes:
        info: the description of the model; None before it is loaded.
        last_used: monotonic seconds of its last image, None before the first.
    """

    def __init__(self, backbones: Backbones, settings: Settings) -> None:
        self.info: ModelInfo | None = None
        self.last_used: float | None = None
        self.backbone = LocalEngine(
            self._load,
            device=backbones.settings.device,
            queue_size=backbones.settings.queue_size,
            max_delay=backbones.settings.max_delay_ms / 1000,
            on_batch=backbones.on_batch,
        )
        self._backbones, self._settings = backbones, settings
        self._joined: tuple[LocalEngine, ModelInfo] | None = None
        self._closed = False
        self._on_change: Callable[[], None] = lambda: None

    @property
    def engines(self) -> tuple[Self]:
        """Return this engine: it is no group."""
        return (self,)

    @property
    def status(self) -> EngineStatus:
        """Return the status of what computes."""
        return self.backbone.status

    @property
    def ready(self) -> bool:
        """Return whether the model takes images."""
        return self.info is not None and self.backbone.ready

    @property
    def size(self) -> int:
        """Return the measured bytes of the backbone."""
        runner = self.backbone.runner
        return 0 if runner is None else runner.size

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading on a thread; `on_change` is called on the running event loop."""
        self._on_change = on_change
        with self._backbones.lock:
            self._backbones.users[self.backbone] = [self]
        self.backbone.start(partial(self._backbones.changed, self.backbone))

    def infer(
        self, request: InferenceRequest, *, timeout: float
    ) -> Coroutine[Any, Any, InferenceResult]:
        """See `Engine.infer`."""
        self.last_used = time.monotonic()
        return self.backbone.infer(request, timeout=timeout)

    def embed_texts(self, texts: Sequence[str], *, timeout: float) -> Coroutine[Any, Any, Floats]:
        """See `Engine.embed_texts`."""
        self.last_used = time.monotonic()
        return self.backbone.embed_texts(texts, timeout=timeout)

    async def close(self) -> None:
        """Leave the backbone, which is closed with its last model; see `LocalEngine.close`."""
        pool = self._backbones
        with pool.lock:
            self._closed = True  # its thread hands it over to nobody any more
        if self._joined is not None:
            self.changed()  # it has, and the event loop has not seen it yet
        backbone = self.backbone
        with pool.lock:
            users = pool.users.get(backbone, [])
            if self in users:
                users.remove(self)
            if not users:
                pool.users.pop(backbone, None)
        runner = backbone.runner
        if not users:
            await backbone.close()
            if self.info is None and self.status.state == "closed":
                self._on_change()  # who waits for it to be loaded need not any more
        elif runner is not None and self.info is not None:
            left = {user.info.head for user in users if user.info is not None}
            if self.info.head not in left:
                runner.heads.pop(self.info.head, None)

    def changed(self) -> None:
        """Look at the engine, whose state has changed, or which handed the model over to another
        one.
        """
        if self._joined is not None:
            with self._backbones.lock:
                self._backbones.users.pop(self.backbone, None)
            (self.backbone, self.info), self._joined = self._joined, None
        elif self.info is None:
            self.info = self.backbone.info
        self._on_change()

    def _load(self) -> tuple[ModelRunner, ModelInfo]:
        """Load the model, on a thread; raises `HandedOver` where another engine has its backbone."""
        pool = self._backbones
        runner, info = pool.load(self._settings)
        with pool.lock:
            if self._closed:
                raise HandedOver  # to nobody: it is not wanted any more
            found = next((each for each in pool.users if each.runner is runner), None)
            if found is None:
                self.backbone.runner = runner  # before another thread looks for it
                return runner, info
            pool.users[found].append(self)
            self._joined = found, info
        raise HandedOver


def _release(error: BaseException | None) -> None:
    """Clear the frames of an error and of those that led to it: they may hold a whole model, and
    the error lives on.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
