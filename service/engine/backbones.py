"""The engines of models, which share one `LocalEngine` for each backbone.

    ModelEngine (a model's version) --+
    ModelEngine ----------------------+--> LocalEngine: one queue, one runner with a head for each

A model is loaded by its own engine, on a thread. The loader asks whether another engine has
the model's backbone (`Backbones.runner`). If so, that engine answers for the model, too: the
model's own engine ends, and the event loop takes the other one (`ModelEngine.changed`). An engine
is closed with its last model. `service.models.residency` decides which backbone is unloaded for
others.
"""

import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self

from model.errors import CheckpointError
from service.engine.engine import Answer, LocalEngine
from service.engine.interface import ModelRunner
from service.engine.messages import (
    BatchReport,
    EngineStatus,
    InferenceRequest,
    InferenceResult,
    ModelInfo,
)
from service.engine.texts import Floats
from service.model_settings import as_keys
from service.settings import Settings

# A version to load: None for the configured one, another checkpoint, or all settings of a model.
Checkpoint = str | Mapping[str, Any] | None

PROBLEM: Final = "problem"
"""Key in a model's settings. Its value says why they are broken; the load fails with it."""

PLACE: Final = "place"
"""Key in a model's settings. Its value names the file or document that states the others."""

# Returns the runner that already has a backbone, by the backbone's key (`ModelInfo.backbone`).
FindRunner = Callable[[str], ModelRunner | None]

# Loads the model that the settings name onto their device, into a runner that has its backbone.
Loader = Callable[[Settings, FindRunner], tuple[ModelRunner, ModelInfo]]


class Backbones:
    """The backbones of this process, which further models may join.

    Args:
        settings: settings of the process; a model's own settings override them.
        load: called on an engine's thread.
        on_batch: see `LocalEngine`.

    Attributes:
        users: models of each engine that computes; `lock` guards it.
    """

    def __init__(
        self, settings: Settings, load: Loader, on_batch: Callable[[BatchReport], None]
    ) -> None:
        self.settings = settings
        self.load = load
        self.on_batch = on_batch
        self.users: dict[LocalEngine, list[ModelEngine]] = {}
        self.lock = threading.Lock()

    def engine(self, settings: Mapping[str, Any]) -> "ModelEngine":
        """Return the engine of a model with its own settings, not started yet."""
        known = {name: value for name, value in settings.items() if name not in (PROBLEM, PLACE)}
        place = settings.get(PLACE, "")

        def reword(message: str) -> str:
            inherited = self.settings.model_fields_set - known.keys()
            return as_keys(message, place, inherited) if place else message

        copy = self.settings.model_copy(update=known)
        return ModelEngine(self, copy, reword, settings.get(PROBLEM, ""))

    def runner(self, key: str) -> ModelRunner | None:
        """Return the runner that has a backbone; None if it is not loaded."""
        with self.lock:
            for engine in self.users:
                if engine.info is not None and engine.info.backbone == key:
                    return engine.runner
        return None

    def changed(self, engine: LocalEngine) -> None:
        """Tell the models of an engine that its state has changed."""
        for user in list(self.users.get(engine, ())):
            user.changed()


class ModelEngine:
    """The engine of one model, perhaps shared with others; see `service.engine.interface.Engine`.

    Args:
        backbones: the engines that it may share.
        settings: settings of the model.
        reword: rewrites a message about its checkpoint with the settings' names in `PLACE`.
        problem: why its settings are broken; empty if they are not.

    Attributes:
        info: description of the model; None before it is loaded.
        last_used: monotonic seconds of its last image, None before the first.
        backbone: the engine that computes.
    """

    def __init__(
        self,
        backbones: Backbones,
        settings: Settings,
        reword: Callable[[str], str] = str,
        problem: str = "",
    ) -> None:
        self._problem = problem
        self._reword = reword
        self.info: ModelInfo | None = None
        self.last_used: float | None = None
        self.backbone = LocalEngine(
            self._load,
            device=backbones.settings.device,
            queue_size=backbones.settings.queue_size,
            max_delay=backbones.settings.max_delay_ms / 1000,
            on_batch=backbones.on_batch,
        )
        self._backbones = backbones
        self._settings = settings
        # The engine that the thread found, until the event loop takes it up.
        self._joined: tuple[LocalEngine, ModelInfo] | None = None
        self._closed = False
        self._on_change: Callable[[], None] = lambda: None

    @property
    def engines(self) -> tuple[Self]:
        """Return this engine alone: a single engine is its own group."""
        return (self,)

    @property
    def status(self) -> EngineStatus:
        """Return the status of the engine that computes."""
        return self.backbone.status

    @property
    def ready(self) -> bool:
        """Return whether the model takes images."""
        return self.info is not None and self.backbone.ready

    @property
    def size(self) -> int:
        """Return the measured bytes of the backbone."""
        return self.backbone.size

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

    def submit(
        self, request: InferenceRequest, timeout: float, answer: Answer
    ) -> Callable[[], None]:
        """See `LocalEngine.submit`."""
        self.last_used = time.monotonic()
        return self.backbone.submit(request, timeout, answer)

    def embed_texts(self, texts: Sequence[str], *, timeout: float) -> Coroutine[Any, Any, Floats]:
        """See `Engine.embed_texts`."""
        self.last_used = time.monotonic()
        return self.backbone.embed_texts(texts, timeout=timeout)

    async def close(self) -> None:
        """Leave the backbone, and close it with its last model; see `LocalEngine.close`."""
        backbones = self._backbones
        with backbones.lock:
            self._closed = True  # the loading thread hands the model over to no engine from now on
        if self._joined is not None:
            self.changed()  # the thread has handed it over, and the event loop has not seen it yet
        backbone = self.backbone
        with backbones.lock:
            users = backbones.users.get(backbone, [])
            if self in users:
                users.remove(self)
            if not users:
                backbones.users.pop(backbone, None)
        if users:
            self._drop_head(users)
            return
        await backbone.close()
        if self.info is None and self.status.state == "closed":
            self._on_change()  # wakes callers that wait for the load

    def changed(self) -> None:
        """Take up a change of the engine, or the engine that the model was handed over to."""
        if self._joined is not None:
            with self._backbones.lock:
                self._backbones.users.pop(self.backbone, None)
            self.backbone, self.info = self._joined
            self._joined = None
        elif self.info is None:
            self.info = self.backbone.info
        self._on_change()

    def _drop_head(self, users: Sequence["ModelEngine"]) -> None:
        """Drop the model's head from the runner, unless other models have the same head."""
        runner = self.backbone.runner
        if runner is None or self.info is None:
            return
        heads = {user.info.head for user in users if user.info is not None}
        if self.info.head not in heads:
            runner.heads.pop(self.info.head, None)

    def _load(self) -> tuple[ModelRunner, ModelInfo] | None:
        """Load the model, on a thread; return None if another engine has it, or it is closed."""
        if self._problem:
            raise CheckpointError(self._problem)
        backbones = self._backbones
        try:
            runner, info = backbones.load(self._settings, backbones.runner)
        except CheckpointError as error:
            raise CheckpointError(self._reword(str(error))) from error
        info = replace(info, assumed=tuple(map(self._reword, info.assumed)))
        with backbones.lock:
            if self._closed:
                return None
            for engine, models in backbones.users.items():
                if engine.runner is runner:
                    models.append(self)
                    self._joined = engine, info
                    return None
            self.backbone.runner = runner  # before another thread looks for it
            return runner, info
