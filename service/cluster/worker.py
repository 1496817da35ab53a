"""Runs a web worker: the same application as in one process, around engines in other processes.

No torch: a worker starts fast and stays small.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

from service.cluster.channel import EngineChannel
from service.cluster.remote_engine import Balancer, RemoteEngine
from service.cluster.remote_swap import RemoteSwap
from service.cluster.shared_image_store import SharedImageStore
from service.cluster.shared_memory import SharedCounters
from service.cluster.shared_resources import SharedResources
from service.cluster.swap_board import CHANGED
from service.engine.base import Engine
from service.http.lifecycle import Lifecycle, freeze_objects, trim_regularly
from service.http.server import Server
from service.http.watchdog import keep_beating
from service.observe.metrics import Metrics
from service.settings import Settings
from service.web.app import create_app, log_model


class WorkerServer(Server):
    """A server that drains when its supervisor sends a signal, and ignores those that follow.

    What SIGHUP means, which a terminal sends to all processes, is the supervisor's to say.
    """

    def _on_signal(self, number: signal.Signals) -> None:
        if number != signal.SIGHUP:
            self.drain()


def run_web(settings: Settings, shared: SharedResources, worker: int, metrics: Metrics) -> int:
    """Run one web worker until a signal ends it, and return its exit code."""
    counters = shared.counters
    engines = [_engine(group, worker) for group in shared.groups]
    swap = RemoteSwap(shared.board, worker, engines, wake=lambda: os.kill(shared.supervisor, CHANGED))
    lifecycle = Lifecycle()

    async def beside() -> None:
        asyncio.get_running_loop().add_signal_handler(CHANGED, swap.adopt)
        swap.adopt()  # a signal may have come before
        await keep_beating(counters.worker_beats, worker)

    def engine_changed() -> None:
        engine = swap.current.engine
        serving = engine.status.state == "ready"
        counters.worker_state[worker] = SharedCounters.SERVING if serving else SharedCounters.LISTENING
        if serving and worker == 0 and engine.info is not None:
            log_model(engine.status, engine.info)
        if serving:
            freeze_objects()
        os.kill(shared.supervisor, CHANGED)

    app = create_app(
        settings,
        swap,
        metrics,
        lifecycle,
        engine_changed,
        counters.limiter(worker),
        SharedImageStore(
            shared.image_file,
            ttl=settings.recent_ttl,
            max_bytes=settings.recent_bytes,
            clock=lambda: int(counters.seconds[0]),
        ),
        counters.byte_budget(worker, settings.max_receiving_bytes),
        counters.key_limiter(worker, settings.key_max_requests),
    )
    server = WorkerServer(app, settings, lifecycle, beside)
    signal.signal(CHANGED, signal.SIG_IGN)  # from now on it may come
    counters.worker_state[worker] = SharedCounters.LISTENING
    trim_regularly()
    server.run(sockets=[shared.listeners[worker]])
    return lifecycle.exit_code


def _engine(channels: Sequence[EngineChannel], worker: int) -> Engine:
    engines = [RemoteEngine(channel, worker) for channel in channels]
    return engines[0] if len(engines) == 1 else Balancer(engines)
