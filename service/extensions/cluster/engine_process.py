"""Runs an engine process: loads the models, serves web workers, ends on `STOP` or a failure.

Only this process, and a service of one process, imports torch.
"""

import asyncio
import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import uvloop

from model.errors import NewProcessNeeded
from service.background import keep_running
from service.engine.backbones import Backbones, Loader
from service.extensions.cluster.engine_server import EngineServer
from service.extensions.cluster.processes import SERVING, Report
from service.extensions.cluster.supervisor import TRY_AGAIN, Child
from service.models.configured import configured_models
from service.models.local_models import LocalModels
from service.models.override import Override
from service.observe.metrics import Metrics
from service.process_memory import release_memory, trim_regularly
from service.settings import Settings
from service.web.image_stores import MemoryImageStore

logger = logging.getLogger("vitserve")

# Ends an engine process in order. An engine outlives its workers, and SIGTERM, SIGINT and SIGHUP
# may go to all processes at once.
STOP: Final = signal.SIGUSR1


def run_engine(
    settings: Settings,
    child: Child,
    path: Path,
    load: Loader,
    metrics: Metrics,
    overrides: Mapping[str, Override],
    shared: memoryview,
) -> int:
    """Run one device's engine, and return the exit code.

    The code is 0 after `STOP`, and 1 if the engine failed. It is `TRY_AGAIN` if the next process
    starts with another option.

    Args:
        settings: settings with this engine's device.
        child: the supervisor's object for this process.
        path: path of the workers' socket.
        load: loader of predictors, called on the engine's thread.
        overrides: see `LocalModels`.
        shared: see `EngineServer`.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    trim_regularly()
    # uvloop makes a round trip much shorter.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(
            serve_until_stopped(settings, child, path, load, metrics, overrides, shared)
        )


async def serve_until_stopped(
    settings: Settings,
    child: Child,
    path: Path,
    load: Loader,
    metrics: Metrics,
    overrides: Mapping[str, Override],
    shared: memoryview,
) -> int:
    """Serve the workers until a stop or a failure; return the exit code. See `run_engine`."""
    over = asyncio.Event()

    def changed() -> None:
        if models.failure:
            over.set()
        elif models.default.current.engine.ready:
            child.link.send(Report(SERVING, dict(models.overrides)))

    asyncio.get_running_loop().add_signal_handler(STOP, over.set)
    make = Backbones(settings, load, metrics.observe_batch).engine
    models = LocalModels(
        settings, make, configured_models(settings), overrides, on_retired=release_memory
    )
    images = MemoryImageStore(
        ttl=settings.recent_ttl,
        max_bytes=settings.recent_bytes,
        on_evicted=metrics.recent_evicted_age.observe,
    )
    server = EngineServer(models, images, shared, restarts=child.restarts, on_change=changed)
    beating = keep_running("heartbeat", child.link.beat)
    await server.start(path)
    await over.wait()
    has_failed = bool(models.failure)
    failure = models.served[models.default_name].current.engine.backbone.failure
    await server.close()
    beating.cancel()
    if isinstance(failure, NewProcessNeeded) and child.options.get(failure.option) != failure.value:
        logger.warning("%s: restarting with %s=%s", child.name, failure.option, failure.value)
        child.link.send(Report(options={failure.option: failure.value}))
        return TRY_AGAIN
    return int(has_failed)
