"""grpcio's server, in the event loop of the web worker, within the limits of the settings."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import grpc

from service.http import MAX_CONNECTIONS, connection_limit
from service.settings import Settings
from service.web.api_keys import KeyGuard
from service.web.grpc.calls import Calls, Count
from service.web.inference_protocol import GRPC_SERVICE
from service.web.request import Service

_IDENTITY_ONLY: Final = 1
"""Of the set of compressions: what is compressed would be made large before anybody counts it."""

_HANDSHAKE_MILLISECONDS: Final = 5_000
_IDLE_MILLISECONDS: Final = 300_000
_PING_MILLISECONDS: Final = 30_000
_FASTEST_PINGS_MILLISECONDS: Final = 10_000


# It logs each answer that was not sent because its caller had left, by which callers could fill the log.
logging.getLogger("grpc").setLevel(logging.CRITICAL)


def server_options(settings: Settings) -> list[tuple[str, int]]:
    """Return the library's options: https://grpc.github.io/grpc/core/group__grpc__arg__keys.html."""
    # As many as over HTTP, or what is left of the open files that the system allows.
    connections = max(1, connection_limit(2 * MAX_CONNECTIONS) - MAX_CONNECTIONS)
    return [
        ("grpc.max_receive_message_length", settings.max_request_bytes),
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
        ("grpc.max_concurrent_streams", MAX_CONNECTIONS),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MILLISECONDS),
        ("grpc.max_connection_idle_ms", _IDLE_MILLISECONDS),
        # Callers whose machine is gone are noticed, and callers may send pings themselves.
        ("grpc.keepalive_time_ms", _PING_MILLISECONDS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _FASTEST_PINGS_MILLISECONDS),
        ("grpc.so_reuseport", 1),  # workers share the port, which `service.web.grpc.port` keeps
    ]


@asynccontextmanager
async def serving(service: Service, guard: KeyGuard, count: Count, port: int) -> AsyncIterator[int]:
    """Serve on this port as long as the context lasts, and then until the accepted calls are answered.

    Yields the port, which the system chose if it was 0. Raises `RuntimeError` if it is not available.
    """
    settings = service.settings
    handlers = Calls(service, guard, count).handlers()
    server = grpc.aio.server(options=server_options(settings), maximum_concurrent_rpcs=MAX_CONNECTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(GRPC_SERVICE, handlers),))
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    chosen: int = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    try:
        yield chosen
    finally:
        await server.stop(settings.drain_timeout)
