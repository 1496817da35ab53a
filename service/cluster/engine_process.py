"""What an engine process does: load the model, serve the workers, end when it is told to or when it fails.

Only here, and in a service of one process, torch is imported.
"""

from __future__ import annotations

import asyncio
import importlib
import signal
from collections.abc import Callable

from service.cluster.channel import EngineChannel
from service.cluster.engine_server import EngineServer
from service.engine.base import ModelRunner
from service.engine.local import LocalEngine
from service.engine.messages import ModelInfo
from service.metrics.metrics import Metrics
from service.settings import Settings

Load = Callable[[], tuple[ModelRunner, ModelInfo]]

STOP = signal.SIGUSR1
"""Ends an engine process in order. An engine outlives its workers, and SIGTERM and SIGINT may go to all at once."""


def run_engine(settings: Settings, link: EngineChannel, load: Load, metrics: Metrics) -> int:
    """Be one device's engine.

    Args:
        settings: see `service.settings`.
        link: where its workers come from.
        load: see `LocalEngine`.
        metrics: batches are counted here.

    Returns:
        The exit code: 0 after `STOP`, 1 when the engine failed.
    """
    board, index = link.board, link.index

    def on_queue(depth: int) -> None:
        board.queue_depth[index] = depth

    async def main() -> int:
        over = asyncio.Event()
        engine = LocalEngine(
            load,
            device=link.device,
            queue_size=settings.queue_size,
            max_delay=settings.max_delay_ms / 1000,
            on_batch=metrics.observe_batch,
            on_queue=on_queue,
        )

        def changed() -> None:
            if engine.status.state == "ready":
                board.engine_was_ready[index] = 1
            elif engine.status.state == "failed":
                over.set()

        asyncio.get_running_loop().add_signal_handler(STOP, over.set)
        server = EngineServer(engine, link, workers=settings.workers)
        await server.start(changed)
        await over.wait()
        failed = engine.status.state == "failed"
        await server.close()
        return int(failed)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed, as in the web workers; a round trip is much shorter with it."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
