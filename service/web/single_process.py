"""Runs a service of one process: web worker and engine share it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from service.engine.base import Engine
from service.engine.local import Loader, LocalEngine, engine_of
from service.engine.messages import ModelInfo
from service.http import Server
from service.lifecycle import Lifecycle, Terminal, freeze_objects, trim_regularly
from service.models.model import LocalModel
from service.observe.metrics import Metrics
from service.settings import Settings
from service.web.app import create_app, log_model

logger = logging.getLogger("vitserve")

EXAMPLE = "examples/dog.jpg"
"""A picture of the repository, relative to its root."""

_WILDCARDS = ("0.0.0.0", "::")
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")
"""Paths of which one exists in a container of Docker, Podman or Kubernetes."""


def run_single_process(settings: Settings, load: Loader) -> int:
    """Run the service until a signal ends it, and return the exit code; `load` is called on the engine's thread."""
    lifecycle, metrics, terminal = Lifecycle(), Metrics(), Terminal()
    served: list[ModelInfo] = []

    def make(checkpoint: str | None) -> LocalEngine:
        own = settings if checkpoint is None else settings.model_copy(update={"checkpoint": checkpoint})
        return engine_of(own, load, metrics.observe_batch)

    model = LocalModel(make, on_retired=freeze_objects)

    def engine_changed() -> None:
        engine = model.current.engine
        if engine.status.state == "failed":
            server.stop(exit_code=1)
        elif engine.status.state == "ready" and engine.info is not None:
            if served:
                log_model(engine.status, engine.info)
            else:
                _announce(engine, settings, server)
            served[:] = [engine.info]

    app = create_app(settings, model, metrics, lifecycle, engine_changed)
    server = Server(app, settings, lifecycle, on_hang_up=partial(terminal.hang_up, model.reload))
    trim_regularly()
    server.run()
    return lifecycle.exit_code


def log_address(
    settings: Settings, port: int, container_marks: Iterable[str] = _CONTAINER_MARKS, path: str = "/classify"
) -> None:
    """Log where the service answers and what to try, which is a request of this path."""
    in_container = settings.host in _WILDCARDS and any(Path(mark).exists() for mark in container_marks)
    if settings.grpc_port is not None:
        where = "port " if in_container else f"{_reachable(settings.host)}:"
        logger.info("gRPC: %s%d%s", where, settings.grpc_port, " of this container" if in_container else "")
    if in_container:
        # Where a container's port is published is known outside of it only.
        logger.info("ready: port %d of this container (API: /docs)", port)
        return
    base = f"http://{_reachable(settings.host)}:{port}"
    picture = EXAMPLE if Path(EXAMPLE).exists() else "photo.jpg"  # a wheel brings no examples
    logger.info("ready: %s (API: %s/docs). Try:", base, base)
    key = '-H "Authorization: Bearer $VIT_API_KEY" ' if settings.api_keys else ""
    logger.info("  curl %s-F file=@%s '%s%s'", key, picture, base, path)


def _announce(engine: Engine, settings: Settings, server: Server) -> None:
    """Log what is served and where, once the server listens."""
    info = engine.info
    if info is None:
        return
    if not server.is_listening:  # a model that loads before the listener is up
        asyncio.get_running_loop().call_later(0.05, _announce, engine, settings, server)
        return
    freeze_objects()
    log_model(engine.status, info)
    # A model without labels refuses the plain call.
    bare = "/classify?labels=cat,dog" if info.zero_shot else "/embed"
    log_address(settings, server.port, path="/classify" if info.labels else bare)


def _reachable(host: str) -> str:
    """Return an address that a browser on this machine can open."""
    if host in _WILDCARDS:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
