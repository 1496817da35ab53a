"""The invariants of engines and of the choice among them, checked whenever something happens to them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from service.cluster.engine_server import EngineServer
from service.cluster.remote_engine import Balancer, RemoteEngine
from service.engine import streams
from service.engine.local import LocalEngine
from service.engine.messages import BatchReport, InferenceRequest, InferenceResult
from service.engine.streams import Outcome, Waiting, launch
from service.errors import ServiceError
from tests.simulation.device import Device, number_of
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.transport import Network

if TYPE_CHECKING:
    from tests.simulation.world import World

_TICK = 1e-9


class InOrder(dict[Any, None]):
    """A set that is iterated in the order of insertion, where a set's order would follow memory addresses."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


class WatchedBalancer(Balancer):
    """A balancer whose choice is checked."""

    def __init__(self, engines: Sequence[RemoteEngine], scheduler: Scheduler) -> None:
        super().__init__(engines)
        self._scheduler = scheduler

    def _least_loaded(self) -> RemoteEngine:
        chosen = super()._least_loaded()
        if chosen.status.state != "ready":
            self._scheduler.violate("the balancer chose an engine that is not ready")
        if chosen.outstanding > min(engine.outstanding for engine in self.engines if engine.status.state == "ready"):
            self._scheduler.violate("the balancer chose an engine that has more to do than another")
        return chosen


class WatchedServer(EngineServer):
    """An engine server that treats its connections in the same order in every run."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.connections = InOrder()  # type: ignore[assignment]


class WatchedEngine(LocalEngine):
    """The engine of one process, in virtual time; it knows which images wait in it, and until when they may.

    Attributes:
        stopping: whether it was told to end.
    """

    def __init__(self, world: World, process: Process, model: Device, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, clock=process.time)
        self.process = process
        self.model = model
        self.stopping = False
        self._world = world
        self._waiting: dict[int, tuple[float, float, bool]] = {}
        self._alone_since: float | None = process.time()
        self._asked: dict[int, int] = {}
        self._ended_at = math.inf
        model.engine = self

    def submit(self, request: InferenceRequest, timeout: float, done: Callable[[Outcome], None]) -> Waiting:
        now = self.process.time()
        number = number_of(request.pixels)

        def answered(outcome: Outcome) -> None:
            self._forget(request)
            if isinstance(outcome, InferenceResult):
                self._world.answered[number] = self.process
            done(outcome)

        self._asked[id(request)] = number
        self._waiting[id(request)] = now, now + timeout, request.requested.needs_pass
        try:
            return super().submit(request, timeout, answered)
        except ServiceError:
            self._forget(request)
            raise

    def cancel(self, entry: Waiting) -> None:
        super().cancel(entry)  # until it has left the queue, it may be launched
        self._forget(entry.item)

    def _forget(self, request: InferenceRequest) -> None:
        self._waiting.pop(id(request), None)
        self._asked.pop(id(request), None)

    def on_launch(self, batch: Sequence[Waiting]) -> None:
        """Check that each image of a batch still waits, in time and for somebody, and maps behind classification."""
        world, now = self._world, self.process.time()
        if any(entry.item.requested.needs_pass for entry in batch):
            if len(batch) > streams.MAX_EXPLANATION_BATCH:
                world.scheduler.violate(f"{len(batch)} images are explained at once")
            if len(self._streams._queue) and now - batch[0].arrived < streams.MAX_EXPLANATION_WAIT - _TICK:
                world.scheduler.violate("an explanation does not wait for classification")
        for entry in batch:
            number = number_of(entry.item.pixels)
            waited = self._waiting.pop(id(entry.item), None)
            if waited is None:
                world.scheduler.violate(f"image {number} is launched, but waits no more")
            elif now >= waited[1]:
                world.scheduler.violate(f"image {number} is launched {now - waited[1]:.6f} s after its deadline")
            gone = world.gone_at.get(number)
            if gone is not None and now > gone + world.patience:
                world.scheduler.violate(f"image {number} is launched {now - gone:.6f} s after its caller left")

    def check(self) -> None:
        """Check that no image waits longer than it must: not while a stream is free, and for no engine that ended."""
        now, model, scenario = self.process.time(), self.model, self._world.scenario
        if self._asked and self.status.state in {"failed", "closed"}:
            self._ended_at = min(now, self._ended_at)
            if now > max(self._ended_at, self.process.frozen_until) + self._world.patience:
                self._world.scheduler.violate(f"{model.device} ended, and left {list(self._asked.values())} waiting")
        depth = max(len(self._streams._queue), len(self._streams._explanations))
        if depth > scenario.queue_size:
            self._world.scheduler.violate(f"{model.device}: {depth} images in a queue of {scenario.queue_size}")
        if len(self._streams._queue):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        if self.stopping or not self.ready or model.failing:
            return
        for arrived, deadline, explained in self._waiting.values():
            if model.explaining if explained else model.running >= model.streams:
                continue
            if explained:
                # It lets others go first, but not for ever.
                patient_until = arrived + streams.MAX_EXPLANATION_WAIT
                alone_since = patient_until if self._alone_since is None else min(self._alone_since, patient_until)
                free_since = max(arrived, model.unexplaining_since, alone_since)
            else:
                free_since = max(arrived + scenario.max_delay, model.idle_since)
            since = max(free_since, self.process.frozen_until) + scenario.wake_delay + 2 * scenario.grid + _TICK
            if since < now < deadline:
                self._world.scheduler.violate(
                    f"{model.device}: an image waits since {since:.6f}, and nothing is in its way"
                )


def watched_launch(
    runner: Any, batch: Sequence[Waiting], release: Any, clock: Any
) -> tuple[list[Outcome], BatchReport]:
    """Check a launch, and do it."""
    runner.engine.on_launch(batch)
    return launch(runner, batch, release, clock)


class ErrorLog(logging.Handler):
    """Takes the service's log: what only a defect of the service's own code writes is a violation.

    A stranger's bytes may be called an error, a worker's or an engine's never.
    """

    _EXPECTED = ("service.engine.local", "service.engine.streams")

    def __init__(self, network: Network) -> None:
        super().__init__(logging.ERROR)
        self._network = network

    def emit(self, record: logging.LogRecord) -> None:
        receiving = self._network.receiving
        by_stranger = receiving is not None and receiving.stranger
        if record.name not in self._EXPECTED and not (record.name == "service.cluster.channel" and by_stranger):
            cause = f": {record.exc_info[1]!r}" if record.exc_info else ""
            self._network.scheduler.violate(f"{record.name} logs: {record.getMessage()}{cause}")
