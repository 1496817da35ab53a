"""Web workers: the limiter, and the engines that a worker asks, in a process of their own or in its own."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from service.cluster.remote_engine import RemoteEngine
from service.engine.base import Engine
from service.engine.swapping import Generation
from service.http.lifecycle import Lifecycle
from service.http.watchdog import keep_beating
from service.timers import Timers
from service.web.admission import Limiter
from service.web.pipeline import Pipeline
from tests.simulation.scheduler import Process
from tests.simulation.watch import WatchedBalancer

if TYPE_CHECKING:
    from tests.simulation.world import World

_NO_METRICS = SimpleNamespace(stages=defaultdict(lambda: SimpleNamespace(observe=lambda seconds: None)))


class Worker:
    """One web worker, started again when it was killed.

    Attributes:
        process: the one that runs, or ran last.
    """

    def __init__(self, world: World, number: int) -> None:
        self.number = number
        self.remotes: list[RemoteEngine] = []
        self._world = world

    def start(self) -> None:
        """Start the worker's process."""
        world = self._world
        self.process: Process = world.process(f"worker {self.number}")
        self.process.index = self.number
        world.scheduler.note("start", self.process.name)
        self.engine: Engine
        if world.channels:
            self.limiter: Limiter = world.counters.limiter(self.number)
            self.remotes = [RemoteEngine(channel, self.number, retry_seconds=0.01) for channel in world.channels]
            self.process.spawn(keep_beating(world.counters.worker_beats, self.number))
            self.engine = WatchedBalancer(self.remotes, world.scheduler) if len(self.remotes) > 1 else self.remotes[0]
        else:
            self.limiter = Limiter(world.scenario.capacity)
            self.process.call_soon(self._make_local_engine)
        self.process.call_soon(lambda: self.engine.start(lambda: None))
        self.process.call_soon(self._open)

    def _make_local_engine(self) -> None:
        scenario = self._world.scenario
        self.engine = self._world.watch_engine(
            0,
            self.process,
            device="cuda:0",
            queue_size=scenario.queue_size,
            max_delay=scenario.max_delay,
            on_batch=lambda report: None,
        )

    def _open(self) -> None:
        parts: dict[str, Any] = {
            "settings": self._world.settings,
            "generation": Generation(self.engine),
            "metrics": _NO_METRICS,
            "limiter": self.limiter,
            "lifecycle": Lifecycle(),
            "clock": self.process.time,
            "pools": SimpleNamespace(timers=Timers()),
        }
        # What is left out is not on the simulated part of a request's way.
        names = [field.name for field in dataclasses.fields(Pipeline)]
        self.pipeline = Pipeline(**{name: parts.get(name, cast(Any, None)) for name in names})

    def taken(self) -> bool:
        """Return whether a permit or a slot is in use, by this worker's own count."""
        connections: list[Any] = [remote._connection for remote in self.remotes]
        slots = 2 * self._world.scenario.queue_size
        return self.limiter.in_use > 0 or any(len(connection._free) != slots for connection in connections)

    def check(self) -> None:
        """Check that nobody waits for an engine whose connection has ended."""
        for remote in self.remotes:
            connection = remote._connection
            if connection is not None and connection.lost.is_set() and connection._pending:
                self._world.scheduler.violate(f"{self.process.name} waits for an engine that is gone")

    def kill(self) -> None:
        """Kill the process; the supervisor clears its cells and starts another."""
        if not self.process.alive:
            return
        world = self._world
        self.process.end()
        world.requests.worker_died(self.process)
        world.counters.forget_worker(self.number)
        world.scheduler.after(world.scheduler.random.random() * 0.02, self.start)

    def stop(self) -> None:
        """End in order."""

        async def close() -> None:
            await self.engine.close()
            self.process.end()

        self.process.spawn(close())
