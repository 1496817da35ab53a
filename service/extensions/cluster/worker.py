"""Runs a web worker: the same application as in one process, around engines in other processes.

No torch: a worker starts fast and stays small.
"""

import asyncio
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from service.extensions.cluster.processes import RUNNING, SERVING, Report
from service.extensions.cluster.remote_model import EngineClient, RemoteImageStore, RemoteModels
from service.extensions.cluster.supervisor import Child
from service.lifecycle import Lifecycle, freeze_objects, trim_regularly
from service.observe.metrics import Metrics
from service.server import Server
from service.settings import Settings
from service.web.app import create_app, log_model

# Lets a worker load the configured checkpoint again.
RELOAD: Final = signal.SIGUSR1


def share(total: int, index: int, settings: Settings, *, least: int = 1) -> int:
    """Return a worker's part of what all workers may take together; at least `least`, so that one
    request fits.
    """
    count = settings.workers
    return max(total // count + (index < total % count), min(total, least))


def worker_settings(settings: Settings, index: int) -> Settings:
    """Return the settings of one worker, whose places and requests of a key are its share.

    A batch that one process would take is not refused for ever: a share holds the largest request.
    """
    own = {
        "queue_size": share(
            settings.queue_size, index, settings, least=settings.max_images_per_request
        ),
        "key_max_requests": share(settings.key_max_requests, index, settings),
    }
    return settings.model_copy(update=own)


def run_web(
    settings: Settings,
    child: Child,
    listeners: list[socket.socket],
    sockets: Sequence[Path],
    metrics: Metrics,
    *,
    is_first: bool,
) -> int:
    """Run one web worker until a signal ends it, and return its exit code.

    Args:
        settings: of this worker, see `worker_settings`.
        child: this process, as the supervisor knows it.
        sockets: of the engines, by device.
        is_first: whether this worker logs for all what is served.
    """
    engines = [
        EngineClient(path, device) for path, device in zip(sockets, settings.devices, strict=True)
    ]
    models, lifecycle = RemoteModels(engines), Lifecycle()
    logged: dict[str, int] = {}

    async def beside() -> None:
        asyncio.get_running_loop().add_signal_handler(RELOAD, models.reload)
        child.link.send(Report(RUNNING))
        await child.link.beat(metrics.publish)

    def changed() -> None:
        for name, model in models.served.items():
            engine = model.current.engine
            if (
                engine.info is not None
                and engine.ready
                and logged.get(name) != model.current.number
            ):
                logged[name] = model.current.number
                if (
                    model is models.default
                ):  # for each of many models it would hold the heartbeat back for too long
                    child.link.send(Report(SERVING))
                    freeze_objects()
                if is_first:
                    log_model(engine.status, engine.info)

    app = create_app(
        settings, models, metrics, lifecycle, changed, image_store=RemoteImageStore(engines[0])
    )
    server = Server(app, settings, lifecycle, beside, is_supervised=True)
    trim_regularly()
    server.run(sockets=listeners)
    child.link.send(Report(answered=lifecycle.answered, refused=lifecycle.refused))
    return lifecycle.exit_code
