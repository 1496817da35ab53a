"""Run a service in one process, which the web worker and the engine share."""

import asyncio
import logging
from functools import partial
from pathlib import Path
from weakref import WeakSet

from service.addresses import ANY, UNIX, in_url, tcp_hosts
from service.draining import Lifecycle, Terminal
from service.engine.backbones import Backbones, Loader, ModelEngine
from service.engine.messages import ModelInfo
from service.models.configured import configured_models
from service.models.local_models import LocalModels
from service.models.version import Version
from service.observe.metrics import Metrics
from service.process_memory import freeze_objects, release_memory, trim_regularly
from service.server import Server
from service.settings import Settings
from service.web.app import create_app, log_model

logger = logging.getLogger("vitserve")

EXAMPLE = "examples/dog.jpg"
"""A picture in the repository, relative to its root."""


def run_single_process(settings: Settings, load: Loader) -> int:
    """Run the service until a signal ends it, and return the exit code.

    `load` is called on the engine's thread.
    """
    process = SingleProcess(settings, load)
    trim_regularly()
    process.server.run()
    return process.lifecycle.exit_code


class SingleProcess:
    """The models, the application and the server of the process."""

    def __init__(self, settings: Settings, load: Loader) -> None:
        self.lifecycle = Lifecycle()
        self._settings = settings
        metrics = Metrics()
        metrics.observe_process()
        self._is_announced = False
        self._announced: WeakSet[Version[ModelEngine]] = WeakSet()
        make = Backbones(settings, load, metrics.observe_batch).engine
        self._models = LocalModels(
            settings, make, configured_models(settings), on_retired=release_memory
        )
        app = create_app(settings, self._models, metrics, self.lifecycle, self._on_engine_change)
        hang_up = partial(Terminal().hang_up, self._models.reload)
        self.server = Server(app, settings, self.lifecycle, on_hang_up=hang_up)

    def _on_engine_change(self) -> None:
        if self._models.failure:
            self.server.stop(exit_code=1)
        for model in self._models.served.values():
            version = model.current
            if (
                version.engine.ready
                and version.engine.info is not None
                and version not in self._announced
            ):
                self._announced.add(version)
                self._announce(version.engine, version.engine.info)

    def _announce(self, engine: ModelEngine, info: ModelInfo) -> None:
        """Log the loaded model, and once the address, when the server listens."""
        if not self.server.is_listening:
            asyncio.get_running_loop().call_later(0.05, self._announce, engine, info)
            return
        log_model(engine.status, info)
        if not self._is_announced and self._models.default.current.engine is engine:
            self._is_announced = True
            freeze_objects()
            log_address(self._settings, self.server.port, _path_to_try(info))


def _path_to_try(info: ModelInfo) -> str:
    """Return a path that answers without further parameters."""
    if info.labels:
        return "/classify"
    return "/classify?labels=cat,dog" if info.zero_shot else "/embed"


def log_address(settings: Settings, port: int, path: str = "/classify") -> None:
    """Log the addresses of the service, and a request to try with this path."""
    hosts = tcp_hosts(settings.hosts)
    sockets = [host for host in settings.hosts if host not in hosts]
    if hosts:
        local_host = in_url("127.0.0.1" if hosts[0] in ANY else hosts[0])
        base = f"http://{local_host}:{port}"
        further = [f"http://{in_url(host)}:{port}" for host in hosts[1:] if host not in ANY]
        addresses = [base, *further, *sockets]
        unix = ""
    else:
        base = "http://localhost"
        addresses = sockets
        unix = f"--unix-socket {sockets[0].removeprefix(UNIX)} "
    if not {*hosts}.isdisjoint(ANY):
        # A container's published port, and this machine's name for others, are unknown here.
        addresses[0] += f" here, port {port} for others"
    logger.info("ready: %s (API: %s/docs). Try:", ", ".join(addresses), base)
    picture = EXAMPLE if Path(EXAMPLE).exists() else "photo.jpg"  # a wheel lacks the examples
    key = '-H "Authorization: Bearer $VIT_API_KEY" ' if settings.api_keys else ""
    logger.info("  curl %s%s-F file=@%s '%s%s'", unix, key, picture, base, path)
