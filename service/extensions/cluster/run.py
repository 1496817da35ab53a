"""Runs a service of several processes: one per engine, and one per web worker."""

import gc
import logging
import os
import shutil
import signal
import tempfile
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, Self

from prometheus_client import values
from prometheus_client.multiprocess import mark_process_dead

from service.addresses import SocketFiles, listen, port_of
from service.draining import Terminal
from service.engine.backbones import Loader
from service.errors import SettingsError
from service.extensions.cluster.engine_client import EngineClient
from service.extensions.cluster.engine_process import STOP, run_engine
from service.extensions.cluster.processes import RUNNING, SERVING, OperatingSystem, Report
from service.extensions.cluster.shared_pixels import SharedPixels, shared_memory
from service.extensions.cluster.supervisor import Child, Supervisor
from service.extensions.cluster.worker import RELOAD, run_web, worker_settings
from service.models.override import Override
from service.observe import logs
from service.observe.metrics import Metrics
from service.settings import Settings
from service.single_process import log_address

logger = logging.getLogger("vitserve")

# Longest path of the folder: the path of a socket in it has at most 107 bytes.
_MAX_PATH_BYTES: Final = 90


def run_cluster(settings: Settings, load: Loader) -> int:
    """Run the service until a signal ends it, and return the exit code.

    This process only supervises the others.

    Args:
        load: loader of predictors, called in each engine process with the engine's device.
    """
    with Cluster(settings, load) as cluster:
        # Without it, the collector would write to the pages that the children share, and copy them.
        gc.freeze()
        supervisor = Supervisor(
            cluster.workers,
            cluster.engines,
            cluster.system,
            cluster,
            drain_timeout=settings.drain_timeout,
        )
        return supervisor.run()


class Cluster:
    """The processes of one service, their shared objects, and the supervisor's `Events`.

    The folder has the engines' sockets, and the files in which each process counts its metrics
    (`prometheus_client.multiprocess`). The scraped worker adds them up.

    Raises:
        SettingsError: the folder cannot be created.
        OSError: the address is not available.
    """

    def __init__(self, settings: Settings, load: Loader) -> None:
        self._settings = settings
        self._load = load
        self._terminal = Terminal()
        self._overrides: dict[str, Override] = {}
        self._announced = False
        self.system = OperatingSystem()
        # The supervisor keeps them open: if a worker dies, its successor accepts its waiting
        # connections.
        self.listeners = listen(settings.hosts, settings.port, settings.workers)
        self._socket_files = SocketFiles(self.listeners[0])
        self.folder = _private_folder()
        self._shared = [shared_memory(settings.workers) for _ in settings.devices]
        logs.on_drop(self._count_dropped_line)
        self.workers = [
            Child(f"worker {index}", partial(self._be_worker, index), signal.SIGTERM)
            for index in range(settings.workers)
        ]
        self.engines = [
            Child(
                "engine" if device == "auto" else f"engine {device}",
                partial(self._be_engine, index),
                STOP,
            )
            for index, device in enumerate(settings.devices)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.draining()
        self._socket_files.remove()
        shutil.rmtree(self.folder, ignore_errors=True)

    # Events of the supervisor.

    def reported(self, report: Report) -> None:
        """Remember the served checkpoints for restarted engines; log the address once."""
        for name, override in report.overrides.items():
            if override.number >= self._overrides.get(name, override).number:
                self._overrides[name] = override
        if not self._announced and all(
            child.state == SERVING for child in (*self.engines, *self.workers)
        ):
            self._announced = True
            log_address(self._settings, port_of(self.listeners[0]))

    def ended(self, pid: int) -> None:
        """Drop the gauges of an ended process; its counters stay."""
        mark_process_dead(pid, str(self.folder))  # type: ignore[no-untyped-call]

    def draining(self) -> None:
        """Close this process's listeners; the workers still have theirs."""
        self._announced = True  # a closed listener has no address to log
        for listener in chain.from_iterable(self.listeners):
            listener.close()

    def hung_up(self) -> bool:
        """Make a worker reload the configured checkpoint, unless a terminal was closed."""
        return self._terminal.hang_up(self._reload)

    def _count_dropped_line(self) -> None:
        """Count a line that the supervisor has dropped; it creates its metrics only for this."""
        metrics_in(self.folder).log_lines_dropped.inc()

    def _reload(self) -> None:
        running = [
            child.pid for child in self.workers if child.pid is not None and child.state >= RUNNING
        ]
        if running:
            self.system.kill(running[0], RELOAD)
        else:
            logger.warning("not reloaded: no worker is running")

    # The processes.

    def _be_worker(self, index: int, child: Child) -> int:
        listeners = self.listeners[index]
        for listener in chain.from_iterable(self.listeners):
            if listener not in listeners:
                listener.close()
        engines = [
            EngineClient(self._socket(engine), device, SharedPixels(self._shared[engine], index))
            for engine, device in enumerate(self._settings.devices)
        ]
        settings = worker_settings(self._settings, index)
        metrics = metrics_in(self.folder)
        return run_web(settings, child, listeners, engines, metrics, is_first=index == 0)

    def _be_engine(self, index: int, child: Child) -> int:
        self.draining()
        options = {"device": self._settings.devices[index], **child.options}
        settings = self._settings.model_copy(update=options)
        return run_engine(
            settings,
            child,
            self._socket(index),
            self._load,
            metrics_in(self.folder),
            self._overrides,
            self._shared[index],
        )

    def _socket(self, engine: int) -> Path:
        return self.folder / f"engine-{engine}"


def metrics_in(folder: Path) -> Metrics:
    """Return metrics that count in this process's own files in a folder."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values.ValueClass = values.MultiProcessValue()  # type: ignore[no-untyped-call]
    metrics = Metrics(folder)
    metrics.observe_process()
    return metrics


def _private_folder() -> Path:
    """Return a new folder that only this user may enter."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="vitserve-"))
    except OSError as error:
        raise SettingsError(
            f"several processes need a folder for temporary files (TMPDIR): {error}"
        ) from None
    if len(os.fsencode(folder)) > _MAX_PATH_BYTES:
        folder.rmdir()
        raise SettingsError(f"TMPDIR={folder.parent}: expected a shorter path, for sockets in it")
    return folder
