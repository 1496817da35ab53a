"""Distributes images over several engines, each on a device of its own."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from service.cluster.remote_engine import RemoteEngine
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.errors import EngineUnavailable


class Balancer:
    """Sends each image to the engine, of several with the same model, that has the shortest queue over all workers."""

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        self.engines = tuple(engines)
        self._last = 0

    @property
    def info(self) -> ModelInfo | None:
        """Return the description of the model, with the devices of all loaded engines, or None."""
        infos = [engine.info for engine in self.engines if engine.info is not None]
        if not infos:
            return None
        return dataclasses.replace(infos[0], device=",".join(info.device for info in infos))

    @property
    def status(self) -> EngineStatus:
        """Return the status of the first ready engine, with the queue depths and restarts of all."""
        statuses = [engine.status for engine in self.engines]
        first = next((status for status in statuses if status.state == "ready"), statuses[0])
        return dataclasses.replace(
            first,
            device=",".join(status.device for status in statuses),
            queue_depth=sum(status.queue_depth for status in statuses),
            restarts=sum(status.restarts for status in statuses),
        )

    @property
    def ready(self) -> bool:
        """Return whether at least one engine takes images."""
        return any(engine.ready for engine in self.engines)

    def start(self, on_change: Callable[[], None]) -> None:
        """Start all engines."""
        for engine in self.engines:
            engine.start(on_change)

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """See `Engine.infer`."""
        return await self._least_loaded().infer(request, timeout=timeout)

    async def close(self) -> None:
        """Close all engines."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def _least_loaded(self) -> RemoteEngine:
        """Return the ready engine with the fewest images; of equals, the next in turn."""
        count = len(self.engines)
        in_turn = [(self._last + 1 + step) % count for step in range(count)]
        ready = [index for index in in_turn if self.engines[index].ready]
        if not ready:
            raise EngineUnavailable(self.status.reason)
        self._last = min(ready, key=lambda index: self.engines[index].outstanding)
        return self.engines[self._last]
