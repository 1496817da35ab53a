"""Several engines, one a device, as one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from service.cluster.remote_engine import RemoteEngine
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.errors import EngineUnavailable


class Balancer:
    """Several engines as one: an image goes to the engine with the shortest queue, over all workers.

    It is ready as long as one of them is.

    Args:
        engines: one a device, all with the same model.
    """

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        self.engines = tuple(engines)
        self._last = 0

    @property
    def info(self) -> ModelInfo | None:
        """Of the model, on all the devices that have it."""
        infos = [engine.info for engine in self.engines if engine.info is not None]
        if not infos:
            return None
        return dataclasses.replace(infos[0], device=",".join(info.device for info in infos))

    @property
    def status(self) -> EngineStatus:
        """Of the best of them; the queues together."""
        all_of_them = [engine.status for engine in self.engines]
        best = next((status for status in all_of_them if status.state == "ready"), all_of_them[0])
        return dataclasses.replace(
            best,
            device=",".join(status.device for status in all_of_them),
            queue_depth=sum(status.queue_depth for status in all_of_them),
            restarts=sum(status.restarts for status in all_of_them),
        )

    @property
    def ready(self) -> bool:
        """Whether one of them takes images."""
        return any(engine.ready for engine in self.engines)

    def start(self, on_change: Callable[[], None]) -> None:
        """Start all."""
        for engine in self.engines:
            engine.start(on_change)

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """See `Engine.infer`."""
        return await self._shortest().infer(request, timeout=timeout)

    async def close(self) -> None:
        """Close all."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def _shortest(self) -> RemoteEngine:
        """The ready engine with the fewest images; of equals, the next in turn."""
        count = len(self.engines)
        in_turn = [(self._last + 1 + step) % count for step in range(count)]
        ready = [index for index in in_turn if self.engines[index].ready]
        if not ready:
            raise EngineUnavailable(self.status.reason)
        self._last = min(ready, key=lambda index: self.engines[index].load)
        return self.engines[self._last]
