"""Models whose engines are in this process, loaded one at a time when a request needs them."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from service.engine.backbones import ModelEngine
from service.errors import ModelsFull, ServiceError, UnknownModel
from service.models.all_models import Models
from service.models.factory import ModelFactory
from service.models.folder import FolderEntry
from service.models.local_model import LocalModel
from service.models.override import Override
from service.models.residency import Residency
from service.models.retiring import RETIRE_SECONDS
from service.settings import Settings

logger = logging.getLogger("vitserve")


class OnDemandModels(Models):
    """Models of this process; a load serves all requests that wait for it.

    Args:
        settings: settings of the service.
        make: returns an engine, not started yet, for a model's own settings.
        configured: entries of the folder, see `configured_models`.
        overrides: checkpoints by name that another process served instead of the configured ones.
        on_retired: see `OpenVersions`.
        clock: monotonic seconds.

    Attributes:
        overrides: checkpoints by name that are served, or deleted, instead of the configured ones.
    """

    served: dict[str, LocalModel]  # type: ignore[assignment]  # only models of this process

    def __init__(
        self,
        settings: Settings,
        make: Callable[[Mapping[str, Any]], ModelEngine],
        configured: Mapping[str, FolderEntry] | None = None,
        overrides: Mapping[str, Override] | None = None,
        *,
        on_retired: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._factory = ModelFactory(settings, make, configured, overrides, on_retired)
        self.overrides = self._factory.overrides
        super().__init__(self._factory.models(), self._factory.default)
        self.results: Counter[str] = Counter()
        self._memory = Residency(
            self.served,
            settings.models_bytes,
            kept=self._kept,
            results=self.results,
            tasks=self._tasks,
            clock=clock,
        )
        self._load_lock = asyncio.Lock()  # held during each load
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._waiters: Counter[str] = Counter()

    @property
    def failure(self) -> str:
        """Return why the process cannot go on, or an empty text.

        It cannot go on if the default model, a model that had served, or all models failed; with
        strict settings, if any model failed.
        """
        failed = [model for model in self.served.values() if model.state == "failed"]
        all_are_fatal = self._settings.strict or len(failed) == len(self.served)
        for model in failed:
            if all_are_fatal or model.broke or model.is_required:
                return model.current.engine.status.reason
        return ""

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading, the default first; see `Models.start`."""
        self.on_change = on_change
        self._tasks.begin(self._load_all())

    async def close(self) -> None:
        """Close all models."""
        self._tasks.cancel()
        await asyncio.gather(*(model.versions.close_all() for model in self.served.values()))

    async def load(self, name: str | None, caller: str = "") -> None:
        """Wait until a model answers, and load it if it is unloaded; see `Models.load`."""
        key = self.key(name)
        # Keep this version: it may be ready, and unloaded again, before this coroutine runs.
        version = self.served[key].current
        self._waiters[key] += 1
        try:
            while (
                not version.engine.ready
                and key in self.served
                and self.served[key].state in ("loading", "unloaded")
            ):
                load = self._loads.get(key)
                if load is None or load.done():
                    load = self._begin_load(key, caller)
                await asyncio.shield(load)
        finally:
            self._waiters[key] -= 1
        if version.engine.ready:
            return
        if key not in self.served:
            raise UnknownModel(f"{key!r}: the model was deleted")
        self.require_ready(key)

    async def answer_waiting(self, key: str) -> None:
        """Before a removal, load an unloaded model if requests wait for it.

        Its version then answers them, unless it cannot be loaded.
        """
        current = self.served[key].current
        if not current.engine.ready and (self._waiters[key] or current.requests):
            with suppress(ServiceError):
                await self.load(key)

    async def _load_all(self) -> None:
        """Load each model in turn, even if it does not fit.

        Afterwards each model is described, and can refuse a request without being loaded.
        """
        for key, model in list(self.served.items()):
            if model.state == "loading":  # otherwise a request has already caused its load
                await asyncio.wait([self._begin_load(key, at_start=True)])

    def _begin_load(
        self, key: str, caller: str = "", *, at_start: bool = False
    ) -> asyncio.Task[None]:
        task = self._tasks.begin(self._load(key, caller, at_start=at_start))
        self._loads[key] = task
        return task

    async def _load(self, key: str, caller: str, *, at_start: bool) -> None:
        if key in self.served:
            # The load needs the memory of the retiring version. But a request that holds that
            # version may wait for this load.
            await self.served[key].versions.retired(RETIRE_SECONDS)
        async with self._load_lock:
            model = self.served.get(key)
            if model is None or model.state == "ready":
                return
            evicted = self.results["evicted"]
            try:
                self._memory.require_share(caller, key)
                await self._memory.make_room(key, caller)
            except ModelsFull:
                if model.state == "loading":
                    model.current.move("unloaded")
                if not at_start:
                    self.results["failed"] += 1
                raise
            model.on_change = self.on_change
            reason = await model.load_current()
            self.results["failed" if reason else "loaded"] += 1
            if reason and not model.is_required:
                logger.error("model %s: %s", key, reason)
                self._pass_default_on(key)
            try:
                await self._memory.fit(
                    key,
                    caller,
                    evict=not at_start or self._waiters[key] > 0,
                    may_unload=key != self.default_name,
                )
            finally:
                has_evicted = self.results["evicted"] > evicted
                self._memory.charge(caller, model, has_evicted=has_evicted)

    def _pass_default_on(self, key: str) -> None:
        """Make another model the default, if the failed one was not named as the default."""
        if key == self.default_name:
            others = (name for name, model in self.served.items() if model.state != "failed")
            self.default_name = next(others, key)
            self.on_change()

    def _kept(self) -> set[str]:
        """Return the keys of models that are not unloaded for others."""
        return {self.default_name, *(key for key in self.served if self._waiters[key])}
