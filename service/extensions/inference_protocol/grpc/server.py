"""The gRPC server of a web process."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import grpc

from service.addresses import in_url, tcp_hosts
from service.extensions.inference_protocol.grpc.calls import Calls, Count
from service.extensions.inference_protocol.grpc.methods import METHODS, STREAMS
from service.http.connections import MAX_CONNECTIONS
from service.server import connection_limit
from service.settings import Settings
from service.web.api_keys import KeyGuard
from service.web.service import Service

_ELSEWHERE: Final = {
    "ModelStreamInfer": "streams are not supported: call ModelInfer for each request",
    "RepositoryIndex": "over gRPC, models are not listed: POST /v2/repository/index over HTTP",
    "RepositoryModelLoad": "over gRPC, models are not loaded: "
    "POST /v2/repository/models/NAME/load over HTTP",
    "RepositoryModelUnload": "over gRPC, models are not unloaded: "
    "POST /v2/repository/models/NAME/unload over HTTP",
}
"""Methods of other servers, and what to call instead."""


_AVAILABLE: Final = f"no such method: call one of {', '.join(sorted([*METHODS, *STREAMS]))}"


class _OtherMethods(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Refuses calls of all other methods before their message arrives."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Return the handler that names what to call instead."""
        remedy = _ELSEWHERE.get(handler_call_details.method.rpartition("/")[2], _AVAILABLE)
        return grpc.stream_stream_rpc_method_handler(partial(_refuse, remedy))


async def _refuse(remedy: str, _: object, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, remedy)


def _handlers(calls: Calls) -> Iterator[grpc.GenericRpcHandler]:
    """Yield the handler of each service.

    On the wire, a single message is a stream of one message. grpcio reads a stream only when the
    method reads it, so that a call can be refused before its message arrives.
    """
    handlers = {
        path: grpc.stream_unary_rpc_method_handler(partial(calls.answer, path)) for path in METHODS
    }
    handlers |= {
        path: grpc.stream_stream_rpc_method_handler(partial(calls.converse, path))
        for path in STREAMS
    }
    by_service: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
    for path, handler in handlers.items():
        _, service, method = path.split("/")
        by_service.setdefault(service, {})[method] = handler
    for service, methods in sorted(by_service.items()):
        yield grpc.method_handlers_generic_handler(service, methods)
    yield _OtherMethods()


def _options(settings: Settings) -> list[tuple[str, int]]:
    """Return grpcio's options: https://grpc.github.io/grpc/core/group__grpc__arg__keys.html."""
    # The same number as over HTTP, or fewer if the system allows fewer open files.
    connections = max(1, connection_limit(2 * MAX_CONNECTIONS) - MAX_CONNECTIONS)
    return [
        ("grpc.max_receive_message_length", settings.max_request_bytes),
        # No compression: a decompressed message could be large before anything counts its bytes.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_concurrent_streams", MAX_CONNECTIONS),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", 5_000),
        ("grpc.max_connection_idle_ms", 300_000),
        # Detect clients whose machine is down, and accept pings from clients.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.so_reuseport", 1),  # workers share the port, which `grpc_port_kept` holds
    ]


@asynccontextmanager
async def serving(
    service: Service, guard: KeyGuard, count: Count, port: int
) -> AsyncIterator[None]:
    """Serve on a port during the context; at its end, answer the accepted calls.

    Raises:
        RuntimeError: the port is not available.
    """
    settings = service.settings
    calls = Calls(service, guard, count)
    server = grpc.aio.server(options=_options(settings), maximum_concurrent_rpcs=MAX_CONNECTIONS)
    server.add_generic_rpc_handlers(tuple(_handlers(calls)))
    for host in tcp_hosts(settings.hosts):
        # For grpcio, `::` includes all of IPv4.
        if host != "0.0.0.0" or "::" not in settings.hosts:
            server.add_insecure_port(f"{in_url(host)}:{port}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(settings.drain_timeout)
