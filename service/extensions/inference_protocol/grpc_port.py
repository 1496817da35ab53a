"""Reserves the port of gRPC for this service."""

import errno
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from service.addresses import (
    ANY,
    bind_tcp,
    in_url,
    listen,
    port_of,
    tcp_addresses,
    tcp_hosts,
)
from service.errors import SettingsError
from service.extensions.inference_protocol.settings import InferenceProtocolSettings
from service.settings import Settings, settings_of

logger = logging.getLogger("vitserve")


@contextmanager
def grpc_port_kept(settings: Settings) -> Iterator[Settings]:
    """Reserve the port of gRPC during the context; yield the settings with its number.

    grpcio opens its own listeners in each worker. A bound socket that does not listen therefore
    holds the port before and between them (SO_REUSEPORT).

    Raises:
        SettingsError: the port is not available.
    """
    port = settings_of(settings, InferenceProtocolSettings).grpc_port
    if port is None:
        yield settings
        return
    _check_port(settings, port)
    with ExitStack() as holders:
        for address in tcp_addresses(settings.hosts):
            try:
                holder = bind_tcp(address, port, socket.SO_REUSEPORT)
            except OSError as error:  # perhaps another program's connections have just ended
                if address.is_optional and error.errno != errno.EADDRINUSE:
                    continue
                holder = bind_tcp(address, port, socket.SO_REUSEPORT, socket.SO_REUSEADDR)
            holders.enter_context(holder)
            port = port or port_of([holder])
        host = tcp_hosts(settings.hosts)[0]
        logger.info("gRPC: %s:%d", in_url("127.0.0.1" if host in ANY else host), port)
        yield settings.model_copy(update={"grpc_port": port})


def _check_port(settings: Settings, port: int) -> None:
    """Raise `SettingsError` if another program has the port, before a model is loaded."""
    try:
        [probes] = listen(tcp_hosts(settings.hosts), port)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {error.filename}: {error.strerror or error}; "
            "--grpc-port (VIT_GRPC_PORT) chooses another"
        ) from None
    for probe in probes:
        probe.close()
