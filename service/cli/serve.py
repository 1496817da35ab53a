"""`vitserve serve`: runs the service, in one process or in several."""

import argparse
import errno
import gc
import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn

from service.addresses import UNIX, SocketFiles, bind_tcp, listen, port_of, tcp_addresses, tcp_hosts
from service.cli.setting_flags import add_checkpoint, add_setting_flags, settings_from
from service.engine.devices import fit_to_machine, uses_gpu
from service.engine.loading import load_predictor
from service.errors import SettingsError
from service.lifecycle import NEW_OBJECTS, bound_heaps, exit_now
from service.models.registry import configured_models, notes_on_folder
from service.observe import logs
from service.settings import Settings, exports_spans, variable_warnings

logger = logging.getLogger("vitserve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every setting as a flag."""
    add_checkpoint(parser)
    add_setting_flags(parser, [name for name in Settings.model_fields if name != "checkpoint"])


def run(arguments: argparse.Namespace) -> NoReturn:
    """Serve until a signal, then end the process: with 0 after an orderly stop, 1 after a failure."""
    gc.set_threshold(NEW_OBJECTS)  # what is imported stays
    bound_heaps()
    settings = fit_to_machine(settings_from(arguments))
    logs.configure(settings.log_format, settings.log_level)
    logs.never_wait()
    for line in variable_warnings():
        logger.warning("%s", line)
    if not settings.api_keys and not settings.is_local:
        logger.warning(
            "VIT_HOST=%s without VIT_API_KEYS: whoever reaches this service may use it",
            settings.host,
        )
    exports_spans()  # a wrong variable ends the start
    _check_address(settings)
    entries = configured_models(settings, log=logging.DEBUG)  # a wrong folder ends the start
    for line in notes_on_folder(settings, entries):
        logger.warning("%s", line)
    logger.info("loading %s", settings.models or settings.checkpoint)
    with grpc_port_kept(settings) as settings:
        if settings.one_process and not uses_gpu(settings):
            from service.web.single_process import run_single_process  # noqa: PLC0415  --help is quick without

            exit_now(run_single_process(settings, load_predictor))
        if not sys.platform.startswith("linux"):
            raise SettingsError("VIT_WORKERS, VIT_DEVICE: several processes, or a GPU, need Linux")
        from service.extensions.cluster.run import run_cluster  # noqa: PLC0415  what it needs, only Linux has

        exit_now(run_cluster(settings, load_predictor))


def _check_address(settings: Settings) -> None:
    """End with one line if an address cannot be had, before a model is loaded for nothing."""
    hosts = settings.hosts
    for name, port, own in (
        ("port", settings.port, hosts),
        ("grpc_port", settings.grpc_port, tcp_hosts(hosts)),
    ):
        if port is None:
            continue
        try:
            [probes] = listen(own, port)
        except OSError as error:
            setting = "host" if str(error.filename).startswith(UNIX) else name
            flag = f"--{setting.replace('_', '-')} (VIT_{setting.upper()})"
            is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EEXIST)
            other = f"; {flag} chooses another" if is_taken else ""
            sys.exit(
                f"vitserve: cannot listen on {error.filename}: {error.strerror or error}{other}"
            )
        SocketFiles(probes).remove()
        for probe in probes:
            probe.close()


@contextmanager
def grpc_port_kept(settings: Settings) -> Iterator[Settings]:
    """Return the settings with the port of gRPC, if it is served, and keep the port for this
    service's workers.

    grpcio opens its listeners itself, in each worker. So a socket that takes no callers holds the
    port before and between them (SO_REUSEPORT). Raises `OSError` if the port is not available.
    """
    port = settings.grpc_port
    if port is None:
        yield settings
        return
    with ExitStack() as holders:
        for address in tcp_addresses(settings.hosts):
            try:
                holder = bind_tcp(address, port, socket.SO_REUSEPORT)
            except OSError as error:  # perhaps connections of another program have just ended there
                if address.is_optional and error.errno != errno.EADDRINUSE:
                    continue
                holder = bind_tcp(address, port, socket.SO_REUSEPORT, socket.SO_REUSEADDR)
            holders.enter_context(holder)
            port = port or port_of([holder])
        yield settings.model_copy(update={"grpc_port": port})
