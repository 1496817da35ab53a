"""The engines of this process: one for each backbone, whichever models share it.

    ModelEngine (a model's version) --+
    ModelEngine ----------------------+--> LocalEngine: one queue, one runner with a head for each

A model is loaded on a thread of its own engine. Where the loader gives a runner that another engine has already, that
engine answers for the model, too. The last model that leaves closes it. Which one is unloaded for others is decided in
`service.models.registry`.
"""

import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Self

from service.engine.base import ModelRunner
from service.engine.local import HandedOver, Loader, LocalEngine
from service.engine.messages import BatchReport, EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.engine.texts import Floats
from service.settings import Settings

# What is loaded: None for what is configured, a checkpoint in its place, or all settings of one model.
What = str | Mapping[str, Any] | None


class Backbones:
    """The backbones of this process, and how a further model joins them.

    Args:
        settings: of the process; a model's own take the place of theirs.
        load: called on an engine's thread.
        on_batch: see `LocalEngine`.

    Attributes:
        users: the engines that compute, and the models that each of them answers for; changed under `lock`.
    """

    def __init__(self, settings: Settings, load: Loader, on_batch: Callable[[BatchReport], None]) -> None:
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
    """The engine of one model, which may be that of others as well; see `service.engine.base.Engine`.

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

    def infer(self, request: InferenceRequest, *, timeout: float) -> Coroutine[Any, Any, InferenceResult]:
        """See `Engine.infer`."""
        self.last_used = time.monotonic()
        return self.backbone.infer(request, timeout=timeout)

    def embed_texts(self, texts: Sequence[str], *, timeout: float) -> Coroutine[Any, Any, Floats]:
        """See `Engine.embed_texts`."""
        self.last_used = time.monotonic()
        return self.backbone.embed_texts(texts, timeout=timeout)

    async def close(self) -> None:
        """Leave the backbone, which is closed with its last model; see `LocalEngine.close`."""
        backbone, pool = self.backbone, self._backbones
        with pool.lock:
            self._closed = True
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
        """Look at the engine, whose state has changed, or which handed the model over to another one."""
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
