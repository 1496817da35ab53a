"""Runs a service of several processes: each engine and each web worker in one of its own."""

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
from service.cluster.worker import run_web
from service.metrics.metrics import Metrics, count_in_files
from service.settings import Settings
from service.web.single_process import Loader, log_address


def run_cluster(settings: Settings, load: Loader) -> int:
    """Run the service until a signal ends it, and return the exit code; this process only looks after the others.

    `load` is called in each engine's process, with that engine's device in the settings.
    """
    shared = SharedResources(settings)
    supervisor = Supervisor(
        [worker_child(settings, shared, index) for index in range(settings.workers)],
        [engine_child(settings, shared, index, load) for index in range(len(settings.devices))],
        OperatingSystem(),
        drain_timeout=settings.drain_timeout,
        on_tick=Ticker(settings, shared),
        on_drain=shared.stop_listening,
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
        on_death=partial(counters.forget_worker, index),
    )


def engine_child(settings: Settings, shared: SharedResources, index: int, load: Loader) -> Child:
    """Return the child process of one device's engine."""
    counters = shared.counters
    return Child(
        f"engine {shared.channels[index].device}",
        partial(_be_engine, settings, shared, index, load),
        STOP,
        is_running=lambda: bool(counters.engine_ready[index]),
        beats=lambda: int(counters.engine_beats[index]),
        on_death=partial(counters.forget_engine, index),
        on_restart=partial(counters.count_restart, index),
    )


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
    count_in_files(shared.metrics.folder, shared.metrics.worker(index))
    return run_web(settings, shared, index, Metrics(shared.metrics.folder))


def _be_engine(settings: Settings, shared: SharedResources, index: int, load: Loader) -> int:
    shared.stop_listening()
    count_in_files(shared.metrics.folder, shared.metrics.engine(index))
    channel = shared.channels[index]
    own = settings.model_copy(update={"device": channel.device} | shared.counters.changed_options(index))
    return run_engine(own, channel, load, Metrics(shared.metrics.folder))
