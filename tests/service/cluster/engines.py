"""Engines behind channels and workers that ask them, all in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Any

from service.cluster.channel import EngineChannel
from service.cluster.engine_server import EngineServer
from service.cluster.remote_engine import Balancer, RemoteEngine
from service.cluster.shared_memory import SharedCounters
from service.engine.local import LocalEngine
from service.engine.messages import InferenceResult
from tests.service.fakes import PATIENCE, FakePredictor, model_info, request_for


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


@dataclass
class Service:
    """Engines behind channels and workers that ask them."""

    counters: SharedCounters
    channels: list[EngineChannel]
    slots: int
    predictors: list[FakePredictor] = field(default_factory=list)
    servers: list[EngineServer] = field(default_factory=list)
    remotes: list[RemoteEngine] = field(default_factory=list)

    async def start_engine(self, index: int = 0, *, refresh_seconds: float = 1.0) -> FakePredictor:
        """An engine process's part; its predictor."""
        predictor = FakePredictor(device=f"cuda:{index}")

        def on_queue(depth: int) -> None:
            self.counters.queue_depth[index] = depth

        engine = LocalEngine(
            lambda: (predictor, model_info(device=f"cuda:{index}")),
            device="cuda",
            queue_size=self.slots,
            max_delay=0,
            on_batch=lambda _: None,
            on_queue=on_queue,
        )
        channel = self._channel_of_its_own(index)
        server = EngineServer(engine, channel, workers=2, refresh_seconds=refresh_seconds)
        self.predictors.append(predictor)
        self.servers.append(server)
        await server.start()
        return predictor

    def _channel_of_its_own(self, index: int) -> EngineChannel:
        """With a listener that the server may close, as a forked process has it."""
        channel = EngineChannel.__new__(EngineChannel)
        channel.__dict__ |= self.channels[index].__dict__ | {"listener": self.channels[index].listener.dup()}
        return channel

    async def worker(self, number: int = 0, engine: int = 0, *, retry_seconds: float = 0.1) -> RemoteEngine:
        remote = RemoteEngine(self.channels[engine], number, retry_seconds=retry_seconds)
        remote.start(lambda: None)
        self.remotes.append(remote)
        return remote

    async def ready_worker(self, number: int = 0, engine: int = 0) -> RemoteEngine:
        remote = await self.worker(number, engine)
        await until(lambda: remote.ready)
        return remote

    def lose_connections(self, server: EngineServer) -> None:
        """As when the engine process is killed."""
        server._server.close()
        for connection in list(server.connections):
            connection._transport.abort()  # type: ignore[union-attr]


@asynccontextmanager
async def service(engines: int = 1, slots: int = 8) -> AsyncIterator[Service]:
    async with AsyncExitStack() as stack:
        counters = stack.enter_context(closing(SharedCounters(workers=2, engines=engines, capacity=slots)))
        channels = [EngineChannel(index, "cuda", counters, slots=slots) for index in range(engines)]
        for channel in channels:
            stack.callback(channel.close)
        made = Service(counters, channels, slots)
        try:
            yield made
        finally:
            for predictor in made.predictors:
                predictor.gate.set()
            for remote in made.remotes:
                await remote.close()
            for server in made.servers:
                await server.close()


def ask(engine: RemoteEngine | Balancer, red: int, **options: Any) -> asyncio.Task[InferenceResult]:
    return asyncio.create_task(engine.infer(request_for(red, **options), timeout=PATIENCE))
