"""The server, the methods of the service, and the way of a call, as `service.web.middleware` is
that of a request.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

from service.addresses import in_url, tcp_hosts
from service.engine.messages import ModelInfo
from service.errors import MalformedRequest, ModelFailed, NotFound, RequestTimeout, Unavailable
from service.extensions.inference_protocol import (
    GRPC_HEALTH_SERVICE,
    GRPC_PROBES,
    GRPC_SERVICE,
)
from service.extensions.inference_protocol.descriptions import (
    model_configuration,
    model_metadata,
    model_statistics,
    server_metadata,
)
from service.extensions.inference_protocol.grpc import health, reflection
from service.extensions.inference_protocol.grpc import open_inference_pb2 as messages
from service.extensions.inference_protocol.grpc.messages import (
    check_cost,
    decode_request,
    encode_answer,
    parse,
)
from service.extensions.inference_protocol.inference import (
    BYTES_A_VALUE,
    check_version,
    find_model,
    infer,
    read,
)
from service.http.connections import MAX_CONNECTIONS
from service.server import connection_limit
from service.settings import Settings
from service.web.admission import RECEIVING_BYTES, RefusalPace
from service.web.admitted import AdmittedRequest, Sender, network_of
from service.web.api_keys import KeyGuard
from service.web.lanes import Deadline, Lane
from service.web.middleware import Answered, request_id_from
from service.web.problems import CLIENT_DISCONNECTED, INTERNAL_ERROR, problem_of
from service.web.service import Service
from vitserve import __version__

logger = logging.getLogger(__name__)

# It logs each answer that was not sent because its caller had left, by which callers could fill the
# log.
logging.getLogger("grpc").setLevel(logging.CRITICAL)

STATUS_CODES: Final = {
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    HTTPStatus.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.REQUEST_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    HTTPStatus.CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
    # As the library itself says of a message that is too large.
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.MISDIRECTED_REQUEST: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.UNPROCESSABLE_ENTITY: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.INTERNAL_SERVER_ERROR: grpc.StatusCode.INTERNAL,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""The status code of each status that `service.web.problems` gives to an error of a call."""

_GRACE_SECONDS: Final = 0.25
"""Time in which a message must arrive once other callers' messages wait for its turn."""

_OWN_GRACE_SECONDS: Final = 1.0
"""The same once only messages of its own caller wait."""

_ARRIVALS_OF_EACH: Final = 2
"""Messages of one caller that arrive at the same time: callers that send none leave the other turns
free.
"""

_FEWEST_ARRIVALS: Final = 8

_REFUSALS_A_SECOND: Final = 100
"""More wait: each takes a millisecond of the event loop."""

_WATCHES: Final = 64
"""Callers that watch the health at once, and how many of them may be one caller's."""
_WATCHES_OF_EACH: Final = 8

_REFLECTIONS: Final = 8
"""Callers that ask about services at once."""

T = TypeVar("T")

Count = Callable[..., None]
"""`RequestContextMiddleware.count`."""


class Call:
    """A call whose message is still to come, from an `address`; `caller` is as that of a `Sender`."""

    def __init__(self, context: Any, arrivals: Lane, service: Service) -> None:
        self.started = service.clock()
        self.deadline = Deadline(self.started + service.settings.request_timeout, service.clock)
        # Of repeated headers the first counts.
        self.metadata: dict[str, str | bytes] = dict(reversed(context.invocation_metadata()))
        self.request_id = request_id_from(str(self.metadata.get("x-request-id", "")))
        peer = unquote(context.peer()).rpartition(":")[0]  # as ipv6:[::1], without the port
        self.address = peer.partition(":")[2].strip("[]")
        self.caller = network_of(self.address)
        self._context = context
        self._arrivals = arrivals

    async def message(self) -> bytes:
        """Return the message, when it is its turn to arrive.

        The library holds the bytes of a message until it is whole, and does not count them. So few
        messages arrive at the same time, and two of one caller. A slow one gives way when others
        wait.

        Raises:
            MalformedRequest: there is none.
            QueueFull, DeadlineExceeded, RequestTimeout: others are read for all of its time; or it
            came too slowly.
        """
        with self._arrivals.turn(self.caller, 1, self.deadline) as turn:
            await turn
            arrival = asyncio.ensure_future(self._context.read())
            began = asyncio.get_running_loop().time()
            try:
                while not arrival.done():
                    if not self.deadline.remaining():
                        raise RequestTimeout("the message did not arrive in time")
                    seconds = asyncio.get_running_loop().time() - began
                    is_late = self._arrivals.is_crowded and seconds > _GRACE_SECONDS
                    if is_late or (turn.delays_own and seconds > _OWN_GRACE_SECONDS):
                        raise RequestTimeout("the message came too slowly while others waited")
                    await asyncio.wait(
                        {arrival}, timeout=min(self.deadline.remaining(), _GRACE_SECONDS / 4)
                    )
            finally:
                arrival.cancel()
        if arrival.result() is grpc.aio.EOF:
            raise MalformedRequest("the call has no message")
        return bytes(arrival.result())

    async def next_message(self) -> bytes | None:
        """Return the next message of a stream, None at its end; raises `RequestTimeout`."""
        try:
            async with asyncio.timeout(self.deadline.remaining()):
                message = await self._context.read()
        except TimeoutError:
            raise RequestTimeout("the stream's time is up: call again") from None
        return None if message is grpc.aio.EOF else bytes(message)

    async def send(self, message: bytes) -> None:
        """Send a message of an answer that is a stream."""
        await self._context.write(message)

    async def receive(self) -> dict[str, Any]:
        """Return the message in the form of an ASGI request's body; see `message`."""
        return {"type": "http.request", "body": await self.message(), "more_body": False}

    async def question(self) -> messages.ModelRequest:
        """Return a question about the server or a model; raises `UploadTooLarge`, and as `message`."""
        data = await self.message()
        check_cost(memoryview(data), {})
        return parse(messages.ModelRequest, data)


Method = Callable[[Service, Call], Awaitable[bytes]]
"""Returns the encoded answer to a call."""


class Calls:
    """Answers calls: gives each its id, checks its key, counts and logs it, and answers errors by
    status codes.
    """

    def __init__(self, service: Service, guard: KeyGuard, count: Count) -> None:
        self._service = service
        self._guard = guard
        self._count = count
        settings = service.settings
        # As many as largest bodies fit into this worker's part of the bytes to be received.
        most = max(
            _FEWEST_ARRIVALS, RECEIVING_BYTES // settings.max_request_bytes // settings.workers
        )
        self.watches = Lane(
            "watchers", lambda: _WATCHES, clock=service.clock, per_caller=_WATCHES_OF_EACH
        )
        self.reflections = Lane(
            "reflection", lambda: _REFLECTIONS, clock=service.clock, per_caller=_ARRIVALS_OF_EACH
        )
        self._arrivals = Lane(
            "messages", lambda: most, clock=service.clock, per_caller=_ARRIVALS_OF_EACH
        )
        self._pace = RefusalPace(service.clock, _REFUSALS_A_SECOND)

    async def answer(self, path: str, _: object, context: Any) -> bytes:
        """Answer a call of this method by a message, as grpcio calls it."""
        return await self._handled(path, context, partial(METHODS[path], self._service))

    async def converse(self, path: str, _: object, context: Any) -> None:
        """Answer a call of this method by a stream of messages, as grpcio calls it."""
        await self._handled(path, context, partial(STREAMS[path], self))

    @property
    def service(self) -> Service:
        """Return the service that is called."""
        return self._service

    async def _handled(self, path: str, context: Any, work: Callable[[Call], Awaitable[T]]) -> T:
        metrics = self._service.metrics
        call = Call(context, self._arrivals, self._service)
        trailers = [("x-request-id", call.request_id)]
        status, name, code, client = CLIENT_DISCONNECTED, None, None, call.address
        with nullcontext() if path in GRPC_PROBES else metrics.inflight.track_inprogress():
            try:
                key = (
                    None
                    if path in GRPC_PROBES
                    else self._guard.find(str(call.metadata.get("authorization", "")))
                )
                if key is not None:
                    name = call.caller = key.name
                with self._guard.request(key):
                    answer = await work(call)
                context.set_trailing_metadata(trailers)
                status = HTTPStatus.OK
                return answer
            except Exception as error:
                problem = problem_of(error)
                if problem.code == INTERNAL_ERROR:
                    logger.exception("request %s failed", call.request_id)
                metrics.rejected.labels(problem.code).inc()
                status, code = problem.status, problem.code
                seconds = problem.headers.get("Retry-After")
                if (
                    seconds is not None
                ):  # https://github.com/grpc/proposal/blob/master/A6-client-retries.md#pushback
                    trailers.append(("grpc-retry-pushback-ms", f"{seconds}000"))
                await asyncio.sleep(self._pace.delay(None))
                number = STATUS_CODES[HTTPStatus(status)]
                if isinstance(error, ModelFailed):  # clients try UNAVAILABLE again
                    number = grpc.StatusCode.FAILED_PRECONDITION
                await context.abort(number, problem.detail, tuple(trailers))
                raise AssertionError("a call that was ended goes on") from error
            finally:
                taken = self._service.clock() - call.started
                answered = Answered(
                    "gRPC", path, status, taken, call.request_id, name, client, code=code
                )
                self._count(answered, path)


def _encode(document: Mapping[str, Any], message: Message) -> bytes:
    """Return a document of the protocol, which is the same over HTTP, as a message."""
    return bytes(json_format.ParseDict(document, message).SerializeToString())


async def _server_live(service: Service, call: Call) -> bytes:
    return _encode(
        {"live": True}, messages.ServerLiveResponse()
    )  # no message is read, as its caller may have no key


async def _server_ready(service: Service, call: Call) -> bytes:
    return _encode({"ready": _is_ready(service)}, messages.ServerReadyResponse())


async def _model_ready(service: Service, call: Call) -> bytes:
    question = await call.question()
    return _encode(
        {"ready": _is_ready(service, question.name, question.version)},
        messages.ModelReadyResponse(),
    )


def _is_ready(service: Service, name: str | None = None, version: str = "") -> bool:
    try:
        service.check_ready()
        check_version(version)
        service.model(name)
    except (NotFound, Unavailable):
        return False
    return True


async def _server_metadata(service: Service, call: Call) -> bytes:
    await call.question()
    return _encode(server_metadata(__version__, swaps=False), messages.ServerMetadataResponse())


def _described(
    describe: Callable[[ModelInfo, Service], Mapping[str, Any]], kind: type[Message]
) -> Method:
    """Return the method that describes the model that a question names; an empty name is any."""

    async def method(service: Service, call: Call) -> bytes:
        question = await call.question()
        check_version(question.version)
        model = await service.find(question.name or None, call.started)
        return _encode(describe(model.info, service), kind())

    return method


async def _model_infer(service: Service, call: Call) -> bytes:
    """Classify the pictures of the tensor `image` or `pixels`."""
    sender = Sender(call.caller, call.started, call.receive)
    async with AdmittedRequest(service, service.model(), sender) as admitted:
        body = await admitted.body.read_whole()
        named, request = await admitted.write(
            partial(decode_request, body), size=len(body) // BYTES_A_VALUE
        )
        admitted.choose(await find_model(service, named.name or None, named.version, call.started))
        return await infer(admitted, await read(admitted, body, lambda _: request), encode_answer)


async def _check(service: Service, call: Call) -> bytes:
    name = _asked(health.REQUEST, await call.message()).get("service", "")
    return _encode({"status": health.status_of(service, name)}, health.RESPONSE())


async def _watch(calls: Calls, call: Call) -> None:
    name = _asked(health.REQUEST, await call.message()).get("service", "")

    async def send(status: str) -> None:
        await call.send(_encode({"status": status}, health.RESPONSE()))

    with calls.watches.turn(call.caller, 1, call.deadline) as turn:
        await turn
        await health.watch(calls.service, name, send)


async def _reflect(calls: Calls, call: Call) -> None:
    """Answer questions about the services of this port, until the caller ends or the time of a
    request is up.
    """
    with calls.reflections.turn(call.caller, 1, call.deadline) as turn:
        await turn
        while (message := await call.next_message()) is not None:
            await call.send(
                _encode(
                    reflection.answer(_asked(reflection.REQUEST, message)), reflection.RESPONSE()
                )
            )


def _asked(kind: type[Message], data: bytes) -> dict[str, Any]:
    """Return a message of a standard service as a dictionary; raises `MalformedRequest` and
    `UploadTooLarge`.
    """
    check_cost(memoryview(data), {})
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MalformedRequest(f"not the message of this method: {error}") from None
    asked: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return asked


_PROTOCOL: Final[dict[str, Method]] = {
    "ServerLive": _server_live,
    "ServerReady": _server_ready,
    "ModelReady": _model_ready,
    "ServerMetadata": _server_metadata,
    "ModelMetadata": _described(
        lambda info, _: model_metadata(info), messages.ModelMetadataResponse
    ),
    "ModelConfig": _described(
        lambda info, _: {"config": model_configuration(info)}, messages.ModelConfigResponse
    ),
    "ModelStatistics": _described(
        lambda info, service: model_statistics(info, service.metrics),
        messages.ModelStatisticsResponse,
    ),
    "ModelInfer": _model_infer,
}

METHODS: Final = {f"/{GRPC_SERVICE}/{name}": method for name, method in _PROTOCOL.items()} | {
    f"/{GRPC_HEALTH_SERVICE}/Check": _check
}
"""The methods that answer one message, by path."""

STREAMS: Final[dict[str, Callable[[Calls, Call], Awaitable[None]]]] = {
    f"/{GRPC_HEALTH_SERVICE}/Watch": _watch,
    **dict.fromkeys(reflection.PATHS, _reflect),
}
"""The methods that answer a stream, by path."""


def _handlers(calls: Calls) -> Iterator[grpc.GenericRpcHandler]:
    """Yield the handler of each service.

    On the wire a single message is the same as a stream of messages with one element. grpcio reads
    a stream when the method does, so that a call is refused before its message arrives.
    """
    handlers = {
        path: grpc.stream_unary_rpc_method_handler(partial(calls.answer, path)) for path in METHODS
    }
    handlers |= {
        path: grpc.stream_stream_rpc_method_handler(partial(calls.converse, path))
        for path in STREAMS
    }
    for service in sorted({path.split("/")[1] for path in handlers}):
        own = {
            path.split("/")[2]: each
            for path, each in handlers.items()
            if path.split("/")[1] == service
        }
        yield grpc.method_handlers_generic_handler(service, own)


def _options(settings: Settings) -> list[tuple[str, int]]:
    """Return the library's options: https://grpc.github.io/grpc/core/group__grpc__arg__keys.html."""
    # As many as over HTTP, or what is left of the open files that the system allows.
    connections = max(1, connection_limit(2 * MAX_CONNECTIONS) - MAX_CONNECTIONS)
    return [
        ("grpc.max_receive_message_length", settings.max_request_bytes),
        # None: what is compressed would be made large before anybody counts it.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_concurrent_streams", MAX_CONNECTIONS),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", 5_000),
        ("grpc.max_connection_idle_ms", 300_000),
        # Callers whose machine is gone are noticed, and callers may send pings themselves.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.so_reuseport", 1),  # workers share the port, which `service.cli.serve` keeps
    ]


@asynccontextmanager
async def serving(
    service: Service, guard: KeyGuard, count: Count, port: int
) -> AsyncIterator[None]:
    """Serve on this port as long as the context lasts, and then until the accepted calls are
    answered.

    Raises `RuntimeError` if the port is not available.
    """
    settings, calls = service.settings, Calls(service, guard, count)
    server = grpc.aio.server(options=_options(settings), maximum_concurrent_rpcs=MAX_CONNECTIONS)
    server.add_generic_rpc_handlers(tuple(_handlers(calls)))
    for host in tcp_hosts(settings.hosts):
        if host != "0.0.0.0" or "::" not in settings.hosts:  # for grpcio `::` is all of IPv4, too
            server.add_insecure_port(f"{in_url(host)}:{port}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(settings.drain_timeout)
