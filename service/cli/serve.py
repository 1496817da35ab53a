"""`vitserve serve`: build everything, wire it together, run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
import time
from typing import NoReturn

from service import logs
from service.engine.loading import load_predictor
from service.engine.local import LocalEngine
from service.metrics.metrics import Metrics, count_in_files
from service.settings import ENV_PREFIX, Settings, load_settings, unknown_variables
from service.web.app import create_app, log_model
from service.web.lifecycle import Lifecycle, settle
from service.web.server import Server, exit_now

logger = logging.getLogger("vitserve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every setting is a flag, and each flag an environment variable."""
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (None, ()) else f" Default: {field.default}."
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            metavar="VALUE",
            default=argparse.SUPPRESS,
            help=f"{field.description}.{default} [{ENV_PREFIX}{name.upper()}]".replace("%", "%%"),
        )


def run(arguments: argparse.Namespace) -> NoReturn:
    """Serve until a signal ends it; ends the process with 0 after an orderly stop, 1 after a failure.

    Raises:
        SettingsError: a setting with a value that is not allowed.
    """
    settings = load_settings({name: value for name, value in vars(arguments).items() if name in Settings.model_fields})
    logs.configure(settings.log_format, settings.log_level)
    for name in unknown_variables():
        logger.warning("%s is not a setting and is ignored", name)
    _check_address(settings)
    logger.info("loading %s", settings.checkpoint)
    exit_now(_one_process(settings) if settings.one_process else _several_processes(settings))


def _one_process(settings: Settings) -> int:
    """Web worker and engine in this process."""
    lifecycle, metrics = Lifecycle(), Metrics()
    engine = LocalEngine(
        lambda: load_predictor(settings),
        device=settings.device,
        queue_size=settings.queue_size,
        max_delay=settings.max_delay_ms / 1000,
        on_batch=metrics.observe_batch,
    )

    def engine_changed() -> None:
        if engine.status.state == "failed":
            server.stop(exit_code=1)
        elif engine.status.state == "ready":
            _announce(engine, settings, server)

    app = create_app(settings, engine, metrics, lifecycle, engine_changed)
    server = Server(app, settings, lifecycle)
    server.run()
    return lifecycle.exit_code


def _several_processes(settings: Settings) -> int:
    """Each engine and each web worker in a process of its own; this one looks after them."""
    # What these need, only Linux has.
    from service.cluster.engine_process import STOP, run_engine  # noqa: PLC0415
    from service.cluster.shared_resources import Shared  # noqa: PLC0415
    from service.cluster.supervisor import Child, Supervisor  # noqa: PLC0415
    from service.cluster.worker import run_web  # noqa: PLC0415

    shared = Shared(settings)
    board, started = shared.board, time.monotonic()
    announced = False

    def engine(index: int) -> Child:
        link = shared.links[index]
        own = settings.model_copy(update={"device": link.device})

        def main() -> int:
            shared.stop_listening()
            count_in_files(shared.counters, f"engine-{index}")
            return run_engine(own, link, lambda: load_predictor(own), Metrics(shared.counters))

        def is_running() -> bool:
            return bool(board.engine_was_ready[index])

        return Child(
            f"engine {link.device}",
            main,
            STOP,
            is_running,
            on_death=lambda: board.forget_engine(index),
            on_restart=lambda: board.count_restart(index),
        )

    def web(index: int) -> Child:
        def main() -> int:
            for other in {*shared.listeners} - {shared.listeners[index]}:
                other.close()
            count_in_files(shared.counters, f"worker-{index}")
            return run_web(settings, shared, index, Metrics(shared.counters))

        def is_running() -> bool:
            return bool(board.worker_state[index])

        return Child(f"worker {index}", main, signal.SIGTERM, is_running, on_death=lambda: board.forget_worker(index))

    def tick() -> None:
        nonlocal announced
        board.seconds[0] = int(time.monotonic() - started)
        if not announced and board.everything_is_ready():
            announced = True
            _say_where(settings, shared.port)

    supervisor = Supervisor(
        [web(index) for index in range(settings.workers)],
        [engine(index) for index in range(len(settings.devices))],
        drain_timeout=settings.drain_timeout,
        on_tick=tick,
        on_drain=shared.stop_listening,
    )
    try:
        return supervisor.run()
    finally:
        shared.close()


def _announce(engine: LocalEngine, settings: Settings, server: Server) -> None:
    """Say where to look and what to try, once there is something to see."""
    info = engine.info
    if info is None or server.should_exit:  # stopped while it was loading
        return
    if not server.started:  # a model that loads before the listener is up
        asyncio.get_running_loop().call_later(0.05, _announce, engine, settings, server)
        return
    settle()
    log_model(engine.status, info)
    _say_where(settings, server.port)


def _say_where(settings: Settings, port: int) -> None:
    base = f"http://{_reachable(settings.host)}:{port}"
    logger.info("ready: %s (API: %s/docs). Try:", base, base)
    logger.info("  curl -F file=@examples/dog.jpg '%s/classify'", base)


def _check_address(settings: Settings) -> None:
    """Say in one line that the address cannot be had, before a model is loaded for nothing."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            sys.exit(f"vitserve: cannot listen on {settings.host}:{settings.port}: {error.strerror or error}")


def _reachable(host: str) -> str:
    """An address that a browser on this machine can open."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
