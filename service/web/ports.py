"""The port of gRPC: chosen once, and shared by all workers, each of which listens on it by itself."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from service.settings import Settings


@contextmanager
def grpc_port_kept(settings: Settings) -> Iterator[Settings]:
    """Return the settings with the port of gRPC, if it is served, which is kept for this service's listeners.

    The library makes its listeners itself, in each worker. So one socket, which takes no callers, holds the port before
    and between them (SO_REUSEPORT).

    Raises:
        OSError: the port cannot be had.
    """
    if settings.grpc_port is None:
        yield settings
        return
    with socket.socket(address_family(settings.host), socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        address = settings.host, settings.grpc_port
        try:
            holder.bind(address)  # another service that looks whether the port is free sees that it is not
        except OSError:  # also where connections of another program's have just ended there
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(address)
        yield settings.model_copy(update={"grpc_port": holder.getsockname()[1]})


def address_family(host: str) -> socket.AddressFamily:
    """Return the family of a host's address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
