"""One simulated service: its processes run the service's own code, and the world starts, kills and checks them.

load    requests come and callers leave while the plan's faults happen
heal    no more faults: every engine is started again, and every worker finds it
probe   every worker asks every engine; every counter is back at zero
stop    workers, then engines, end in order
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

from service.cluster import engine_process
from service.cluster.shared_memory import SharedCounters
from service.engine import local, streams
from service.settings import Settings
from service.web import single_process
from tests.simulation.device import Defect, Device
from tests.simulation.heartbeats import Heartbeats
from tests.simulation.requests import Requests
from tests.simulation.scenario import Fault, scenario_of
from tests.simulation.scheduler import Process, Scheduler, Violation
from tests.simulation.strangers import Stranger
from tests.simulation.threads import Threads, VirtualThread
from tests.simulation.transport import Network, SimulatedChannel
from tests.simulation.watch import ErrorLog, WatchedEngine, WatchedServer, watched_launch
from tests.simulation.workers import Worker

_SETTINGS = Settings()
_LOG = logging.getLogger("service")
_LONG = 10.0
"""Virtual seconds within which anything that is awaited must have happened."""
_HEALING = 0.8
"""Virtual seconds that pass without faults before all must be well: the time of an engine's end and a start."""


class World:
    """The service of one seed.

    Attributes:
        gone_at: when the caller of each image left or its worker was killed, by the image's number.
        patience: seconds after which an engine has heard of that.
        trace: what happened, when that was asked for.
        answered: the engine's process that computed an image and gave its answer away, by the image's number.
        disturbed: whether an engine may be missing at this moment.
    """

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.scenario = scenario_of(seed)
        self.scheduler = Scheduler(seed, grid=self.scenario.grid, trace=trace)
        self.threads = Threads(self.scheduler, wake_delay=self.scenario.wake_delay, on_exception=self._thread_ended)
        self.network = Network(self.scheduler, delay=self.scenario.message_delay)
        self.settings = _SETTINGS.model_copy(
            update={
                "queue_size": self.scenario.queue_size,
                "max_delay_ms": self.scenario.max_delay * 1000,
                "workers": self.scenario.workers,
            }
        )
        self.trace: list[str] = []
        self.disturbed = self.scenario.disturbs_engines
        self.patience = self.scenario.message_delay + sum(fault.seconds for fault in self.scenario.faults)
        self.patience += 3 * self.scenario.grid + 1e-9
        self.requests = Requests(self)
        self.gone_at = self.requests.gone_at
        self.counters = SharedCounters(
            workers=self.scenario.workers, engines=max(1, self.scenario.engines), capacity=self.scenario.capacity
        )
        self.channels = [
            SimulatedChannel(index, self.counters, self.network, slots=2 * self.scenario.queue_size)
            for index in range(self.scenario.engines)
        ]
        self.answered: dict[int, Process] = {}
        self.strangers: list[Stranger] = []
        self.processes: list[Process] = []
        self.engines: dict[int, Process] = {}
        self.watched: dict[int, WatchedEngine] = {}
        self.exit_codes: list[int] = []
        self.workers = [Worker(self, number) for number in range(self.scenario.workers)]
        self.heartbeats = Heartbeats(self)
        self._stopping = False
        self.scheduler.on_quiet = self._check

    def run(self) -> None:
        """Live through the scenario; raises `Violation` when an invariant breaks."""
        self.scheduler.note(self.scenario)
        with self._installed():
            try:
                self._live()
            finally:
                self._bury()

    # The phases.

    def _live(self) -> None:
        run, scenario = self.scheduler.run, self.scenario
        for index in range(scenario.engines):
            self.start_engine(index)
        for worker in self.workers:
            worker.start()
        self.requests.plan(scenario.requests)
        self.heartbeats.start()
        for fault in scenario.faults:
            self.scheduler.after(fault.at, functools.partial(self._happen, fault))
        last = max((fault.at for fault in scenario.faults), default=0.0) + self.scheduler.now
        self.scheduler.note("--- load")
        run(lambda: self.requests.over() and self.scheduler.now >= last, until=self.scheduler.now + _LONG)
        self.scheduler.note("--- heal")
        self._replace_broken()
        run(lambda: not self.heartbeats.any_frozen(), until=self.scheduler.now + _LONG)
        healed = self.scheduler.now + _HEALING
        self.scheduler.at(healed, lambda: None)
        run(lambda: self.scheduler.now >= healed and self._is_whole(), until=self.scheduler.now + _LONG)
        self.scheduler.note("--- probe")
        self.disturbed = self.disturbed and not scenario.engines
        self.requests.probe()
        run(lambda: self.requests.over() and self._is_empty(), until=self.scheduler.now + _LONG)
        self.requests.check_all_answered()
        for stranger in self.strangers:
            stranger.check()
        self.scheduler.note("--- stop")
        self.disturbed = self._stopping = True
        for worker in self.workers:
            worker.stop()
        run(lambda: not any(worker.process.alive for worker in self.workers), until=self.scheduler.now + _LONG)
        for index in self.engines:
            self._stop_engine(index)
        run(lambda: not any(engine.alive for engine in self.engines.values()), until=self.scheduler.now + _LONG)

    def _replace_broken(self) -> None:
        """Kill the engines whose device is dead and not found out yet."""
        for index in self.engines:
            model = self.watched[index].model
            if model.dead or model.defect:
                self.kill_engine(index)

    def _is_whole(self) -> bool:
        return not self.scenario.engines or all(
            worker.process.alive and all(remote.ready for remote in worker.remotes) for worker in self.workers
        )

    def _is_empty(self) -> bool:
        """Return whether no permit, slot or place in a queue is taken."""
        counters = self.counters
        return not (
            counters.permits_taken.any()
            or counters.outstanding.any()
            or counters.queue_depth.any()
            or any(worker.taken() for worker in self.workers)
        )

    def _check(self) -> None:
        """Check what holds at any moment."""
        taken = sum(worker.limiter.in_use for worker in self.workers if worker.process.alive)
        if taken > self.scenario.capacity or int(self.counters.permits_taken.sum()) > self.scenario.capacity:
            self.scheduler.violate(f"{taken} permits are taken, where {self.scenario.capacity} exist")
        for engine in self.watched.values():
            if engine.process.alive:
                engine.check()
        for worker in self.workers:
            if worker.process.alive:
                worker.check()

    # Processes.

    def process(self, name: str) -> Process:
        """Make a process."""
        process = Process(self.scheduler, name)
        self.threads.run_in(process)
        self.processes.append(process)
        return process

    def device(self, index: int) -> Device:
        """Make a device."""
        shortest, longest = self.scenario.batch_seconds
        return Device(
            self.scheduler,
            self.threads,
            lambda: self.scheduler.random.uniform(shortest, longest),
            name=f"cuda:{index}",
            max_batch=self.scenario.max_batch,
            streams=self.scenario.streams,
        )

    def watch_engine(self, index: int, process: Process, *arguments: Any, **options: Any) -> WatchedEngine:
        """Make an engine, in place of `LocalEngine`."""
        device = self.device(index)
        load = lambda: (device, device.info())  # noqa: E731
        engine = WatchedEngine(self, process, device, load, *arguments, **options)
        self.watched[index] = engine
        return engine

    def start_engine(self, index: int) -> None:
        """Start an engine's process, as the supervisor does."""
        process = self.engines[index] = self.process(f"engine {index}")
        process.index = index
        self.scheduler.note("start", process.name)
        metrics = cast(Any, SimpleNamespace(observe_batch=lambda report: None))

        async def main() -> None:
            code = await engine_process._serve(self.settings, self.channels[index], lambda _: None, metrics)  # type: ignore[arg-type,return-value]
            self.exit_codes.append(code)
            self.scheduler.note(process.name, "ends with", code)
            self._engine_ended(index)

        process.spawn(main())

    def kill_engine(self, index: int) -> None:
        """Kill an engine's process; the supervisor clears its cells and starts another."""
        if self.engines[index].alive:
            self.engines[index].killed = True
            self._engine_ended(index)

    def _engine_ended(self, index: int) -> None:
        self.engines[index].end()
        self.counters.forget_engine(index)
        if not self._stopping:
            self.counters.count_restart(index)
            self.scheduler.after(self.scheduler.random.random() * 0.02, lambda: self.start_engine(index))

    def _stop_engine(self, index: int) -> None:
        if index in self.watched:
            self.watched[index].stopping = True
        self.engines[index].signal(engine_process.STOP)

    def _thread_ended(self, thread: VirtualThread, error: BaseException) -> None:
        if not isinstance(error, Defect):
            self.scheduler.violate(f"{thread.process.name}, thread {thread.name}: {error!r}")

    # Faults.

    def _happen(self, fault: Fault) -> None:
        self.scheduler.note("FAULT", fault.kind, fault.target)
        target = fault.target
        if fault.kind == "kill worker":
            self.workers[target].kill()
        elif fault.kind == "stranger":
            self.strangers.append(Stranger(self.channels[target], self.process("stranger"), self.scheduler))
        elif fault.kind == "kill engine":
            self.kill_engine(target)
        elif fault.kind == "freeze worker":
            self.heartbeats.freeze(self.workers[target].process, fault.seconds)
        elif fault.kind == "freeze engine":
            if self.counters.engine_ready[target]:  # one that starts may be silent for a minute
                self.heartbeats.freeze(self.engines[target], fault.seconds)
        elif fault.kind == "stop engine":
            self._stop_engine(target)
        elif target in self.watched:
            engine = self.watched[target]
            engine.model.dead |= fault.kind == "device dies"
            engine.model.defect |= fault.kind == "defect"
            if fault.kind == "stall":
                engine.process.stalled_until = self.scheduler.now + fault.seconds

    # Around it all.

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        """Put the simulation's threads and watched classes into the modules that are simulated."""
        replaced: list[tuple[Any, str, Any]] = [
            (local, "threading", self.threads),
            (streams, "threading", self.threads),
            (streams, "launch", watched_launch),
            (streams, "lower_priority", lambda: None),  # virtual threads are all of this one
            (streams, "MAX_EXPLANATION_WAIT", 0.03),
            (streams, "MAX_EXPLANATION_BATCH", 2),
            (single_process, "LocalEngine", self._local_engine),
            (engine_process, "EngineServer", WatchedServer),
        ]
        originals = [(module, name, getattr(module, name)) for module, name, _ in replaced]
        log, propagated = ErrorLog(self.network), _LOG.propagate
        try:
            for module, name, value in replaced:
                setattr(module, name, value)
            _LOG.addHandler(log)
            _LOG.propagate = False
            yield
        finally:
            for module, name, value in originals:
                setattr(module, name, value)
            _LOG.removeHandler(log)
            _LOG.propagate = propagated

    def _local_engine(self, load: Callable[[], Any], **options: Any) -> WatchedEngine:
        process = self.threads.current_process()
        return self.watch_engine(process.index, process, **options)

    def _bury(self) -> None:
        """Unwind all threads and tasks, and close what the service holds."""
        self.trace, self.scheduler.trace = self.scheduler.trace or [], None
        self.threads.bury()
        for process in self.processes:
            process.bury()
        for channel in self.channels:
            channel.close()
        self.counters.close()


def run_seed(seed: int, *, trace: bool = False) -> tuple[Violation | None, list[str]]:
    """Run one seed; return what broke, if anything did, and the trace."""
    world = World(seed, trace=trace)
    try:
        world.run()
    except Violation as violation:
        return violation, world.trace
    return None, world.trace
