"""`vitserve serve`: build everything, wire it together, run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from typing import Any, NoReturn

from service import logs
from service.app import VERSION, create_app
from service.engine import LocalEngine
from service.lifecycle import Lifecycle
from service.loading import load_predictor
from service.metrics import Metrics
from service.server import Server, exit_now
from service.settings import ENV_PREFIX, Settings, load_settings, unknown_variables

logger = logging.getLogger("vitserve")


def add_parser(commands: Any) -> None:
    """Every setting is a flag, and each flag an environment variable."""
    parser = commands.add_parser("serve", help="serve a checkpoint over HTTP (the default)")
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (None, ()) else f" Default: {field.default}."
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            metavar="VALUE",
            default=argparse.SUPPRESS,
            help=f"{field.description}.{default} [{ENV_PREFIX}{name.upper()}]".replace("%", "%%"),
        )
    parser.set_defaults(run=run)


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
    logger.info("loading %s", settings.checkpoint)
    server.run()
    exit_now(lifecycle.exit_code)


def _announce(engine: LocalEngine, settings: Settings, server: Server) -> None:
    """Say where to look and what to try, once there is something to see."""
    info = engine.info
    if info is None:
        return
    if not server.started:  # a model that loads before the listener is up
        asyncio.get_running_loop().call_later(0.05, _announce, engine, settings, server)
        return
    compiled = engine.status.compiled
    logger.info("vitserve %s: %s on %s in %s, compile: %s", VERSION, info.name, info.device, info.dtype, compiled)
    base = f"http://{_reachable(settings.host)}:{server.port}"
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
