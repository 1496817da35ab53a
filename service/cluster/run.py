"""Runs a service of several processes: a process for each engine and each web worker."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable
from functools import partial

from service.cluster.engine_process import STOP, run_engine
from service.cluster.processes import OperatingSystem
from service.cluster.shared_resources import SharedResources
from service.cluster.supervisor import Child, Supervisor
from service.cluster.swap import Swap
from service.cluster.swap_board import GROUPS
from service.cluster.worker import run_web
from service.http.lifecycle import Terminal
from service.observe.metrics import Metrics, count_in_files
from service.settings import Settings
from service.web.single_process import Loader, log_address


def run_cluster(settings: Settings, load: Loader) -> int:
    """Run the service until a signal ends it, and return the exit code; this process only looks after the others.

    `load` is called in each engine's process, with that engine's device in the settings.
    """
    shared, system, terminal = SharedResources(settings), OperatingSystem(), Terminal()
    workers = [worker_child(settings, shared, index) for index in range(settings.workers)]
    engines = [
        [engine_child(settings, shared, index, load, group) for index in range(len(settings.devices))]
        for group in range(GROUPS)
    ]
    swap = Swap(shared, engines, workers, system, settings.checkpoint)
    ticker = Ticker(settings, shared)

    def tick() -> None:
        ticker()
        swap.tick()

    def drain() -> None:
        shared.stop_listening()
        swap.abandon()

    supervisor = Supervisor(
        workers,
        [child for group in engines for child in group],
        system,
        drain_timeout=settings.drain_timeout,
        on_tick=tick,
        on_drain=drain,
        on_hang_up=partial(terminal.hang_up, swap.reload),
    )
    gc.freeze()  # else the collector would write to pages that the children share, and copy them
    try:
        return supervisor.run()
    finally:
        shared.close()


def worker_child(settings: Settings, shared: SharedResources, index: int) -> Child:
    """Return the child process of one web worker."""
    counters = shared.counters
    return Child(
        f"worker {index}",
        partial(_be_worker, settings, shared, index),
        signal.SIGTERM,
        is_running=lambda: bool(counters.worker_state[index]),
        beats=lambda: int(counters.worker_beats[index]),
        on_death=partial(_forget_worker, shared, index),
    )


def engine_child(settings: Settings, shared: SharedResources, index: int, load: Loader, group: int = 0) -> Child:
    """Return the child process of one device's engine; only engines of the first group are started at once."""
    channel = shared.groups[group][index]
    counters = channel.counters
    child = Child(
        "engine" if channel.device == "auto" else f"engine {channel.device}",
        partial(_be_engine, settings, shared, index, load, group),
        STOP,
        is_running=lambda: bool(counters.engine_ready[index]),
        beats=lambda: int(counters.engine_beats[index]),
        on_death=partial(counters.forget_engine, index),
        on_restart=partial(counters.count_restart, index),
    )
    if group:
        child.spare, child.start_at = True, None
    return child


class Ticker:
    """Publishes the seconds of the service's life; logs once where it answers, when all is ready and not draining."""

    def __init__(
        self, settings: Settings, shared: SharedResources, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._shared = shared
        self._clock = clock
        self._started = clock()
        self._announced = False

    def __call__(self) -> None:
        """Look at the clock and at the counters."""
        counters = self._shared.counters
        counters.seconds[0] = int(self._clock() - self._started)
        if not self._announced and self._shared.listening and counters.all_ready():
            self._announced = True
            log_address(self._settings, self._shared.port)


def _be_worker(settings: Settings, shared: SharedResources, index: int) -> int:
    for other in {*shared.listeners} - {shared.listeners[index]}:
        other.close()
    count_in_files(shared.metrics.folder, f"worker-{index}")
    return run_web(settings, shared, index, Metrics(shared.metrics.folder))


def _be_engine(settings: Settings, shared: SharedResources, index: int, load: Loader, group: int) -> int:
    shared.stop_listening()
    channel = shared.groups[group][index]
    count_in_files(shared.metrics.folder, f"engine-{group * len(settings.devices) + index}")
    own = {"device": channel.device, "checkpoint": shared.board.checkpoints[group].read()}
    return run_engine(
        settings.model_copy(update=own | channel.changed_options()),
        channel,
        load,
        Metrics(shared.metrics.folder),
        load_timeout=None if group == shared.board.group else settings.load_timeout,
    )


def _forget_worker(shared: SharedResources, index: int) -> None:
    for [channel, *_] in shared.groups:
        channel.counters.forget_worker(index)
    shared.board.forget_worker(index)
