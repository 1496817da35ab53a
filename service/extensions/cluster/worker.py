"""Runs a web worker: the application of one process, with engines in other processes.

A worker does not import torch, so that it starts fast and stays small.
"""

import asyncio
import signal
import socket
from collections.abc import Sequence
from typing import Final

from service.draining import Lifecycle
from service.extensions.cluster.engine_client import EngineClient
from service.extensions.cluster.processes import RUNNING, SERVING, Report
from service.extensions.cluster.remote_images import RemoteImageStore
from service.extensions.cluster.remote_model import RemoteModels
from service.extensions.cluster.supervisor import Child
from service.observe.metrics import Metrics
from service.process_memory import freeze_objects, trim_regularly
from service.server import Server
from service.settings import Settings
from service.web.app import create_app, log_model

# Makes a worker reload the configured checkpoint.
RELOAD: Final = signal.SIGUSR1


def share(total: int, index: int, settings: Settings, *, least: int = 1) -> int:
    """Return a worker's share of a limit for all workers; at least `least`, if `total` allows."""
    count = settings.workers
    return max(total // count + (index < total % count), min(total, least))


def worker_settings(settings: Settings, index: int) -> Settings:
    """Return the settings of one worker: its share of the slots and of each key's requests.

    The share of slots fits the largest request, so that a worker accepts it like a single process.
    """
    shares = {
        "queue_size": share(
            settings.queue_size, index, settings, least=settings.max_images_per_request
        ),
        "key_max_requests": share(settings.key_max_requests, index, settings),
    }
    return settings.model_copy(update=shares)


def run_web(
    settings: Settings,
    child: Child,
    listeners: list[socket.socket],
    engines: Sequence[EngineClient],
    metrics: Metrics,
    *,
    is_first: bool,
) -> int:
    """Run one web worker until a signal ends it, and return its exit code.

    Args:
        settings: settings of this worker, see `worker_settings`.
        child: the supervisor's object for this process.
        listeners: listening sockets of this worker.
        engines: the engines' clients, in the order of the devices.
        metrics: metrics of this worker.
        is_first: whether this worker logs the served models for all.
    """
    models = RemoteModels(engines)
    lifecycle = Lifecycle()
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
                # Freezing for each of many models would delay the heartbeat for too long.
                if model is models.default:
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
