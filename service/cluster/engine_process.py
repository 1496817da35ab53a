"""Runs an engine process: loads the model, serves the workers, ends on `STOP` or when it fails.

Only here, and in a service of one process, torch is imported.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import signal
from collections.abc import Callable
from functools import partial

from model.errors import NewProcessNeeded
from service.cluster.channel import EngineChannel
from service.cluster.engine_server import EngineServer
from service.cluster.supervisor import TRY_AGAIN
from service.http.lifecycle import trim_regularly
from service.http.watchdog import keep_beating
from service.observe.metrics import Metrics
from service.settings import Settings
from service.web.single_process import Loader, engine_of

logger = logging.getLogger("vitserve")

STOP = signal.SIGUSR1
"""Ends an engine process in order. An engine outlives its workers, and SIGTERM, SIGINT and SIGHUP may go to all at
once."""


def run_engine(
    settings: Settings, channel: EngineChannel, load: Loader, metrics: Metrics, *, load_timeout: float | None = None
) -> int:
    """Run one device's engine, and return the exit code.

    It is 0 after `STOP`, 1 when the engine failed, and `TRY_AGAIN` when the next one starts with another option.

    Args:
        settings: see `service.settings`; the device is this engine's.
        load: called on the engine's thread.
        load_timeout: see `LocalEngine`.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    trim_regularly()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(settings, channel, load, metrics, load_timeout))


async def _serve(
    settings: Settings,
    channel: EngineChannel,
    load: Loader,
    metrics: Metrics,
    load_timeout: float | None = None,
) -> int:
    counters, index = channel.counters, channel.index
    over = asyncio.Event()

    on_queue = partial(counters.queue_depth.__setitem__, index)
    engine = engine_of(settings, load, metrics.observe_batch, load_timeout=load_timeout, on_queue=on_queue)

    def engine_changed() -> None:
        if engine.status.state == "ready":
            counters.engine_ready[index] = 1
        elif engine.status.state == "failed":
            over.set()

    asyncio.get_running_loop().add_signal_handler(STOP, over.set)
    server = EngineServer(engine, channel, workers=settings.workers)
    beating = asyncio.create_task(keep_beating(counters.engine_beats, index))
    await server.start(engine_changed)
    await over.wait()
    failed, failure = engine.status.state == "failed", engine.failure
    await server.close()
    beating.cancel()
    if isinstance(failure, NewProcessNeeded) and channel.change_option(failure.option, failure.value):
        logger.warning("engine %s: starting again with %s=%s", channel.device, failure.option, failure.value)
        return TRY_AGAIN
    if failed:
        channel.failure.write(engine.status.reason)
    return int(failed)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory where it is installed, as in the web workers: a round trip is much shorter with it."""
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return None
    return factory
