"""The port of gRPC, which the workers of a service share."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from service.settings import Settings


@contextlib.contextmanager
def grpc_port_kept(settings: Settings) -> Iterator[Settings]:
    """Return the settings with the port of gRPC, if it is served, and keep the port for this service's workers.

    The library opens its listeners itself, in each worker. So a socket that takes no callers holds the port before and
    between them (SO_REUSEPORT). Raises `OSError` if the port is not available.
    """
    if settings.grpc_port is None:
        yield settings
        return
    with socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        address = settings.host, settings.grpc_port
        try:
            holder.bind(address)
        except OSError:  # perhaps connections of another program have just ended there
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(address)
        yield settings.model_copy(update={"grpc_port": holder.getsockname()[1]})
