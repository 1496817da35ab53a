"""The memory of models: which backbones are loaded, and which one is unloaded for another.

A load takes all cores for a good part of a second. So a backbone that was loaded for a caller stays
for some seconds, and others are unloaded for the same caller only once in that time. An operator's
load has an empty caller, and may unload any backbone.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Final

from service.background import Tasks
from service.engine.backbones import ModelEngine
from service.errors import ModelsFull
from service.models.local_model import LocalModel
from service.models.retiring import RETIRE_SECONDS
from service.models.version import Version

logger = logging.getLogger("vitserve")

RESIDENCY_SECONDS: Final = 30.0
"""Seconds for which a backbone stays in memory after it was loaded for a request.

One caller causes at most one load that unloads others in this time.
"""

_TOO_BUSY_SECONDS: Final = 5.0
"""Value of Retry-After when the other models have work."""

UNNAMED: Final = "unnamed"
"""A caller without a known key or address, as over a Unix socket."""


class Residency:
    """Memory of the models of this process.

    Args:
        served: live mapping of the models by key.
        capacity: bytes that backbones may take; None if they are not limited.
        kept: returns the keys of models that stay loaded.
        results: counts the backbones that were `evicted`.
        tasks: runs unloads that no load waits for.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        served: Mapping[str, LocalModel],
        capacity: int | None,
        *,
        kept: Callable[[], set[str]],
        results: Counter[str],
        tasks: Tasks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._served = served
        self._capacity = capacity
        self._kept = kept
        self._results = results
        self._retiring: set[Version[ModelEngine]] = set()
        self._tasks = tasks
        self._clock = clock
        self._sizes: dict[str, int] = {}
        self._resident_until: dict[str, float] = {}  # by backbone
        self._charged_until: dict[str, float] = {}  # by caller

    # Bytes

    def loaded(self) -> dict[str, int]:
        """Return the bytes of each backbone that is loaded, or still retiring."""
        sizes = {}
        for version in self._retiring:
            if version.engine.info is not None:
                sizes[version.engine.info.backbone] = version.engine.size
        for backbone, models in self._ready().items():
            sizes[backbone] = models[0].current.engine.size
        return sizes

    def lacking(self, key: str) -> int:
        """Return the bytes by which a model exceeds the memory left by others; 0 if it fits."""
        if self._capacity is None:
            return 0
        loaded = self.loaded()
        needed = 0
        model = self._served.get(key)
        if model is not None and model.info is not None and model.info.backbone not in loaded:
            needed = self._sizes.get(model.info.backbone, 0)
        return max(0, sum(loaded.values()) + needed - self._capacity)

    # Callers

    def require_share(self, caller: str, key: str) -> None:
        """Raise `ModelsFull` if a caller's loads would unload others twice within a short time."""
        seconds = self._charged_until.get(caller, 0.0) - self._clock()
        if seconds > 0 and self.lacking(key):
            raise _full(
                f"others were unloaded for this caller less than {RESIDENCY_SECONDS:g} s ago",
                seconds,
            )

    def charge(self, caller: str, model: LocalModel, *, has_evicted: bool) -> None:
        """Charge a load to its caller, and let the model's backbone stay for some seconds."""
        if not caller:
            return
        now = self._clock()
        self._charged_until = {
            other: until for other, until in self._charged_until.items() if until > now
        }
        if has_evicted:
            self._charged_until[caller] = now + RESIDENCY_SECONDS
        if model.info is not None and model.state == "ready":
            self._resident_until[model.info.backbone] = now + RESIDENCY_SECONDS

    # Unloading

    async def make_room(self, key: str, caller: str) -> None:
        """Unload backbones until a model fits, for a caller that is charged.

        Raises:
            ModelsFull: the other models are in use, or were loaded recently.
        """
        while lacking := self.lacking(key):
            models = self._to_evict(lacking, {key, *self._kept()}, caller)
            self._results["evicted"] += 1
            await self._give_back(models)

    async def fit(self, key: str, caller: str, *, evict: bool, may_unload: bool) -> None:
        """Unload models if memory is short now that a model is loaded.

        Args:
            key: key of the loaded model.
            caller: see `Models.load`.
            evict: whether to unload others for it.
            may_unload: whether to unload the model itself if others are not unloaded.

        Raises:
            ModelsFull: others were to be unloaded, and could not be.
        """
        for backbone, models in self._ready().items():
            self._sizes[backbone] = models[0].current.engine.size
        model = self._served.get(key)
        if model is None or model.state != "ready" or not self.lacking(key):
            return
        try:
            if evict:
                await self.make_room(key, caller)
            elif may_unload:
                await self._give_back([model])
        except ModelsFull:
            if may_unload:
                await self._give_back([model])
            raise

    def unload(self, models: list[LocalModel]) -> asyncio.Task[None]:
        """Unload models, and return a task that ends after their last requests.

        Until then, their memory counts as used.
        """
        retiring = {model.current for model in models}
        self._retiring |= retiring
        for model in models:
            model.unload()
        return self._tasks.begin(self._retired(models, retiring))

    async def _retired(self, models: list[LocalModel], retiring: set[Version[ModelEngine]]) -> None:
        await asyncio.gather(*(model.versions.retired() for model in models))
        self._retiring -= retiring

    async def _give_back(self, models: list[LocalModel]) -> None:
        """Unload models, but wait only shortly for their last requests: other loads wait, too."""
        await asyncio.wait([self.unload(models)], timeout=RETIRE_SECONDS)

    def _to_evict(self, lacking: int, kept: Collection[str], caller: str) -> list[LocalModel]:
        """Return the models of the least recently used backbone without work."""
        ready = self._ready()
        idle = self._idle(ready, kept)
        loaded = self.loaded()
        if sum(loaded[backbone] for backbone in idle) < lacking:
            raise _full("the models in use leave too little memory", _TOO_BUSY_SECONDS)
        if caller:
            now = self._clock()
            stay_seconds = {
                backbone: self._resident_until.get(backbone, now) - now for backbone in idle
            }
            idle = [backbone for backbone in idle if stay_seconds[backbone] <= 0]
            if sum(loaded[backbone] for backbone in idle) < lacking:
                shortest = min(seconds for seconds in stay_seconds.values() if seconds > 0)
                raise _full(
                    f"the others were loaded less than {RESIDENCY_SECONDS:g} s ago", shortest
                )
        evicted = min(idle, key=lambda backbone: (_last_used(ready[backbone]), backbone))
        logger.info("backbone %s is unloaded: others need its memory", evicted)
        return ready[evicted]

    def _ready(self) -> dict[str, list[LocalModel]]:
        """Return the ready models of each backbone."""
        ready: dict[str, list[LocalModel]] = {}
        for model in self._served.values():
            if model.state == "ready" and model.info is not None and model.info.backbone:
                ready.setdefault(model.info.backbone, []).append(model)
        return ready

    def _idle(self, ready: Mapping[str, list[LocalModel]], kept: Collection[str]) -> list[str]:
        """Return the backbones whose models are idle, except the kept ones."""
        kept_infos = [self._served[key].info for key in kept if key in self._served]
        kept_backbones = {info.backbone for info in kept_infos if info is not None}
        return [
            backbone
            for backbone, models in ready.items()
            if backbone not in kept_backbones
            and not any(model.current.requests for model in models)
        ]


def _last_used(models: list[LocalModel]) -> float:
    return max(max(model.last_used or 0.0, model.loaded) for model in models)


def _full(reason: str, seconds: float) -> ModelsFull:
    """Return the error of a model that does not fit, with the seconds until another try."""
    retry_after = max(1, math.ceil(seconds))
    return ModelsFull(
        f"{reason}: try again in {retry_after} s, or raise VIT_MODELS_BYTES", retry_after
    )
