"""What a web worker does: the same application as in one process, around engines in other processes.

No torch: a worker starts fast and stays small.
"""

from __future__ import annotations

import os
import signal

from service.admission import SharedPlaces
from service.app import create_app, say_what
from service.engine import Engine
from service.engine_group import EngineGroup
from service.lifecycle import Lifecycle, settle
from service.metrics import Metrics
from service.processes import Shared
from service.remote_engine import RemoteEngine
from service.server import Server
from service.settings import Settings
from service.shared_memory import Board
from service.shared_recent import SharedRecentImages

CHANGED = signal.SIGUSR1
"""Tells the supervisor to look at the board."""


class WorkerServer(Server):
    """A server that drains when its supervisor says so; a signal that comes twice says nothing new."""

    def _on_signal(self, number: signal.Signals) -> None:
        self.drain()


def run_web(settings: Settings, shared: Shared, worker: int, metrics: Metrics) -> int:
    """Be one web worker, until a signal.

    Returns:
        The exit code.
    """
    board, listener = shared.board, shared.listeners[worker]
    engines = [RemoteEngine(link, worker) for link in shared.links]
    engine: Engine = engines[0] if len(engines) == 1 else EngineGroup(engines)
    lifecycle = Lifecycle()

    def engine_changed() -> None:
        serving = engine.status.state == "ready"
        board.worker_state[worker] = Board.SERVING if serving else Board.LISTENING
        if serving and worker == 0 and engine.info is not None:
            say_what(engine.status, engine.info)
        if serving:
            settle()
        os.kill(shared.supervisor, CHANGED)

    app = create_app(
        settings,
        engine,
        metrics,
        lifecycle,
        engine_changed,
        SharedPlaces(board, worker),
        SharedRecentImages(
            shared.recent,
            ttl=settings.recent_ttl,
            max_bytes=settings.recent_bytes,
            clock=lambda: int(board.seconds[0]),
        ),
    )
    server = WorkerServer(app, settings, lifecycle)
    board.worker_state[worker] = Board.LISTENING
    server.run(sockets=[listener])
    return lifecycle.exit_code
