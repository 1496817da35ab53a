"""The engines of this process: one for each backbone, whichever models share it.

    ModelEngine (a model's version) --+
    ModelEngine ----------------------+--> Backbone --> LocalEngine: one queue, one runner with a head for each

A model is loaded on a thread of its own engine. Where the loader gives a runner that another engine has already, that
engine answers for the model, too. The last model that leaves closes it. Which one is unloaded for others is decided in
`service.models.registry`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Self

from service.engine.base import ModelRunner
from service.engine.local import HandedOver, Loader, LocalEngine
from service.engine.messages import BatchReport, EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.engine.texts import Floats
from service.settings import Settings

# What is loaded: None for what is configured, a checkpoint in its place, or all settings of one model.
What = str | Mapping[str, Any] | None


class Backbone:
    """An engine, and the models that it answers for.

    Args:
        pool: with the settings of the process.
        load: see `LocalEngine`.

    Attributes:
        runner: returns what the engine runs; None before that is loaded, and once it is gone.
    """

    def __init__(self, pool: Backbones, load: Callable[[], tuple[ModelRunner, ModelInfo]]) -> None:
        self.engine = LocalEngine(
            load,
            device=pool.settings.device,
            queue_size=pool.settings.queue_size,
            max_delay=pool.settings.max_delay_ms / 1000,
            on_batch=pool.on_batch,
        )
        self.users: list[ModelEngine] = []
        self.runner: Callable[[], ModelRunner | None] = lambda: None

    def changed(self) -> None:
        """Tell the models that the engine's state has changed."""
        for user in list(self.users):
            user.changed()


class Backbones:
    """The backbones of this process, and how a further model joins them.

    Args:
        settings: of the process; a model's own take the place of theirs.
        load: called on an engine's thread.
        on_batch: see `LocalEngine`.
    """

    def __init__(self, settings: Settings, load: Loader, on_batch: Callable[[BatchReport], None]) -> None:
        self.settings, self.load = settings, load
        self.live: list[Backbone] = []
        self.lock = threading.Lock()
        self.on_batch = on_batch

    def engine(self, own: Mapping[str, Any]) -> ModelEngine:
        """Return the engine of a model with settings of its own, not started yet."""
        return ModelEngine(self, self.settings.model_copy(update=dict(own)))


class ModelEngine:
    """The engine of one model, which may be that of others as well; see `service.engine.base.Engine`.

    Attributes:
        info: the description of the model; None before it is loaded.
        last_used: monotonic seconds of its last image, None before the first.
    """

    def __init__(self, backbones: Backbones, settings: Settings) -> None:
        self.info: ModelInfo | None = None
        self.last_used: float | None = None
        self.backbone = Backbone(backbones, self._load)
        self._backbones, self._settings = backbones, settings
        self._joined: tuple[Backbone, ModelInfo] | None = None
        self._closed = False
        self._on_change: Callable[[], None] = lambda: None

    @property
    def engines(self) -> tuple[Self]:
        """Return this engine: it is no group."""
        return (self,)

    @property
    def status(self) -> EngineStatus:
        """Return the status of what computes."""
        return self.backbone.engine.status

    @property
    def ready(self) -> bool:
        """Return whether the model takes images."""
        return self.info is not None and self.backbone.engine.ready

    @property
    def size(self) -> int:
        """Return the measured bytes of the backbone."""
        runner = self.backbone.runner()
        return 0 if runner is None else runner.size

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading on a thread; `on_change` is called on the running event loop."""
        self._on_change = on_change
        self.backbone.users.append(self)
        self.backbone.engine.start(self.backbone.changed)

    def infer(self, request: InferenceRequest, *, timeout: float) -> Coroutine[Any, Any, InferenceResult]:
        """See `Engine.infer`."""
        self.last_used = time.monotonic()
        return self.backbone.engine.infer(request, timeout=timeout)

    def embed_texts(self, texts: Sequence[str], *, timeout: float) -> Coroutine[Any, Any, Floats]:
        """See `Engine.embed_texts`."""
        self.last_used = time.monotonic()
        return self.backbone.engine.embed_texts(texts, timeout=timeout)

    async def close(self) -> None:
        """Leave the backbone, which is closed with its last model; see `LocalEngine.close`."""
        backbone, pool = self.backbone, self._backbones
        with pool.lock:
            self._closed = True
            if self in backbone.users:
                backbone.users.remove(self)
            is_last = not backbone.users
            if is_last and backbone in pool.live:
                pool.live.remove(backbone)
        runner = backbone.runner()
        if is_last:
            await backbone.engine.close()
            if self.info is None and self.status.state == "closed":
                self._on_change()  # who waits for it to be loaded need not any more
        elif runner is not None and self.info is not None:
            left = {user.info.head for user in backbone.users if user.info is not None}
            if self.info.head not in left:
                runner.heads.pop(self.info.head, None)

    def changed(self) -> None:
        """Look at the engine, whose state has changed, or which handed the model over to another one."""
        if self._joined is not None:
            (self.backbone, self.info), self._joined = self._joined, None
        elif self.info is None:
            self.info = self.backbone.engine.info
        self._on_change()

    def _load(self) -> tuple[ModelRunner, ModelInfo]:
        """Load the model, on a thread; raises `HandedOver` where another engine has its backbone."""
        pool = self._backbones
        runner, info = pool.load(self._settings)
        with pool.lock:
            if self._closed:
                raise HandedOver  # to nobody: it is not wanted any more
            found = next((each for each in pool.live if each.runner() is runner), None)
            if found is None:
                self.backbone.runner = weakref.ref(runner)
                pool.live.append(self.backbone)
                return runner, info
            found.users.append(self)
            self._joined = found, info
        raise HandedOver
