"""Swaps of models: a next version is loaded beside the current one, and takes over when it is warm.

wait for an older version -> make room -> load the next version -> all engines agree -> take over
                                          any error: the next version is closed, the current stays
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from service.engine.backbones import Checkpoint, ModelEngine
from service.errors import (
    CheckpointRefused,
    EngineUnavailable,
    ModelsFull,
    NameTaken,
    SwapUnderWay,
)
from service.models.all_models import SWAP_UNDER_WAY
from service.models.local_model import LocalModel
from service.models.on_demand import OnDemandModels
from service.models.override import Override
from service.models.version import Version

logger = logging.getLogger("vitserve")

LOAD_SECONDS: Final = 600.0
"""Longest load of a next checkpoint, warm-up included; the first load may take any time."""


async def _agreed() -> None:
    """Agree at once: no other process loads the version."""


class SwappableModels(OnDemandModels):
    """Models of this process that a put loads or replaces; see `OnDemandModels`."""

    async def put(self, name: str, checkpoint: Checkpoint) -> bool:
        """Load a model, or replace one, even if the caller leaves; see `Models.put`."""
        return await asyncio.shield(self._tasks.begin(self.replace(name, checkpoint)))

    async def replace(
        self,
        name: str,
        checkpoint: Checkpoint,
        *,
        waits: bool = False,
        agree: Callable[[], Awaitable[None]] = _agreed,
    ) -> bool:
        """Load a version, and let it take over; return whether the name is new.

        If this call is cancelled before that, the version is closed.

        Args:
            name: name of the model.
            checkpoint: see `Models.put`. None means the configured checkpoint if there is one and
                either `waits` is set or the model is the default; else the served one.
            waits: whether to wait for the load under way.
            agree: called when the version is loaded; returns when it may take over, or raises an
                error that refuses it.

        Raises:
            The errors of `put`.
        """
        key = self.key(name, is_new=True)
        if key in self.served and (waits or not self._load_lock.locked()):
            await self.answer_waiting(key)
        async with self._exclusive_load(key, waits=waits):
            model = self.served.get(key)
            if checkpoint is None and model is not None:
                is_configured = key in self._factory.configured and (waits or model is self.default)
                if not is_configured:
                    checkpoint = model.current.checkpoint
            try:
                await self._make_room(key)
                await self._replace(key, model, checkpoint, agree)
            except (CheckpointRefused, ModelsFull):
                self.results["failed"] += 1
                raise
            finally:
                if model is not None:
                    model.is_being_replaced = False
            self.results["loaded"] += 1
            self.on_change()
        async with self._load_lock:
            await self._memory.fit(key, "", evict=True, may_unload=key != self.default_name)
        return model is None

    @asynccontextmanager
    async def _exclusive_load(self, key: str, *, waits: bool) -> AsyncIterator[None]:
        """Hold the lock of loads, once the version before a model's current one is closed.

        So there are never three versions in memory. Other models may load meanwhile.

        Raises:
            SwapUnderWay: another load is under way, and `waits` is false.
        """
        while waits or not self._load_lock.locked():
            async with self._load_lock:
                model = self.served.get(key)
                if model is None or not model.versions.is_retiring:
                    yield
                    return
            await model.versions.retired()
        raise SwapUnderWay(SWAP_UNDER_WAY)

    async def _make_room(self, key: str) -> None:
        model = self.served.get(key)
        if model is self.default and not model.current.engine.ready:
            raise EngineUnavailable(model.current.engine.status.reason)
        if model is not None and model.state == "unloaded":
            model.is_being_replaced = True
            self.on_change()
        await self._memory.make_room(key, "")

    async def _replace(
        self,
        key: str,
        current: LocalModel | None,
        checkpoint: Checkpoint,
        agree: Callable[[], Awaitable[None]],
    ) -> None:
        """Load a version beside the current model, if there is one, and let it take over."""
        if current is None:
            number = self._factory.override(key).number + 1
            model = self._factory.model(key, Override(number, checkpoint))
            version = model.current
        else:
            path = checkpoint.get("checkpoint") if isinstance(checkpoint, Mapping) else checkpoint
            logger.info(
                "loading %s beside the model that is served", path or "the configured checkpoint"
            )
            model = current
            version = model.new_version(checkpoint, model.current.number + 1)
        try:
            await self._load_next(key, model, version)
            await agree()
        except BaseException as error:  # also if the caller is cancelled
            if current is not None:
                self._note_refused(key, error)
            await model.versions.close(version)
            raise
        if current is None:
            self.served[key] = model
            model.on_change = self.on_change
        elif self.served.get(key) is not current:  # it was deleted meanwhile
            await model.versions.close(version)
            return
        else:
            model.take_over(version)
            self.results["served"] += 1
            self.refused.discard(key)
        self.overrides[key] = Override(version.number, checkpoint)

    def _note_refused(self, key: str, error: BaseException) -> None:
        if not isinstance(error, asyncio.CancelledError):
            logger.error("the next checkpoint is refused, and the old one stays: %s", error)
        self.results["refused"] += 1
        self.refused.add(key)

    async def _load_next(self, key: str, model: LocalModel, version: Version[ModelEngine]) -> None:
        """Load a version; raises `CheckpointRefused` or `NameTaken`."""
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                reason = await model.load(version)
        except TimeoutError:
            reason = f"it was not loaded and warm within {LOAD_SECONDS:g} s"
        if reason:
            raise CheckpointRefused(reason)
        info = version.engine.info
        if info is not None and not key and (info.name in self.served or info.name in self.heads):
            raise NameTaken(f"{info.name}: another model has the name of this checkpoint")
