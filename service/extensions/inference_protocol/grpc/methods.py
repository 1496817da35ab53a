"""The methods of the services, by path."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

from google.protobuf import json_format

from service.engine.messages import ModelInfo
from service.errors import NotFound
from service.extensions.inference_protocol import GRPC_HEALTH_SERVICE, GRPC_SERVICE
from service.extensions.inference_protocol.descriptions import (
    model_configuration,
    model_metadata,
    model_statistics,
    server_metadata,
)
from service.extensions.inference_protocol.grpc import health, reflection
from service.extensions.inference_protocol.grpc.call import Call
from service.extensions.inference_protocol.grpc.descriptors import message_class
from service.extensions.inference_protocol.grpc.messages import (
    decode_request,
    encode_answer,
    parse,
)
from service.extensions.inference_protocol.inference import (
    BYTES_A_VALUE,
    check_version,
    infer,
    read,
)
from service.web.admit import AdmittedRequest, Sender, acquire, check_open
from service.web.body import read_whole
from service.web.service import Service
from vitserve import __version__

Method = Callable[[Service, Call], Awaitable[bytes]]
"""Returns the encoded answer to a call."""


def _encode(document: Mapping[str, Any], message: str) -> bytes:
    """Return a document of the protocol, the same as over HTTP, as an encoded message."""
    return bytes(json_format.ParseDict(document, message_class(message)()).SerializeToString())


async def _server_live(service: Service, call: Call) -> bytes:
    # Do not receive the message: the call needs no key.
    return _encode({"live": True}, "ServerLiveResponse")


async def _server_ready(service: Service, call: Call) -> bytes:
    return _encode({"ready": _is_ready(service)}, "ServerReadyResponse")


async def _model_ready(service: Service, call: Call) -> bytes:
    request = await call.model_request()
    is_ready = _is_ready(service, request.name, request.version)
    return _encode({"ready": is_ready}, "ModelReadyResponse")


def _is_ready(service: Service, name: str = "", version: str = "") -> bool:
    try:
        check_version(version)
        return health.status_of(service, name) == health.SERVING
    except NotFound:
        return False


async def _server_metadata(service: Service, call: Call) -> bytes:
    await call.model_request()
    return _encode(server_metadata(__version__, swaps=False), "ServerMetadataResponse")


def _described(message: str, describe: Callable[[ModelInfo, Service], Mapping[str, Any]]) -> Method:
    """Return a method that describes the requested model; an empty name is the default model."""

    async def method(service: Service, call: Call) -> bytes:
        request = await call.model_request()
        check_version(request.version)
        with await acquire(service, request.name or None, call.deadline, call.caller) as model:
            return _encode(describe(model.info, service), message)

    return method


async def _model_infer(service: Service, call: Call) -> bytes:
    """Classify the pictures of the tensor `image` or `pixels`."""
    sender = Sender(call.caller, call.started, call.receive)
    check_open(service)
    async with AdmittedRequest(service, None, sender) as admitted:
        body = await read_whole(admitted)
        target, request = await admitted.convert(
            partial(decode_request, body), size=len(body) // BYTES_A_VALUE
        )
        check_version(target.version)
        with await acquire(service, target.name or None, call.deadline, call.caller) as model:
            admitted.model = model
            inference = await read(admitted, body, lambda _: request)
            return await infer(admitted, inference, encode_answer)


async def _checked_name(call: Call) -> str:
    """Return the name of the service or model in a request for its health."""
    name: str = _parsed(health.REQUEST, await call.message()).get("service", "")
    return name


async def _check(service: Service, call: Call) -> bytes:
    status = health.status_of(service, await _checked_name(call))
    return _encode({"status": status}, health.RESPONSE)


async def _watch(service: Service, call: Call) -> None:
    name = await _checked_name(call)

    async def send(status: str) -> None:
        await call.send(_encode({"status": status}, health.RESPONSE))

    await health.watch(service, name, send)


async def _reflect(service: Service, call: Call) -> None:
    """Answer questions about this port's services until the stream ends or reaches its limit."""
    while (message := await call.next_message()) is not None:
        answer = reflection.answer(_parsed(reflection.REQUEST, message))
        await call.send(_encode(answer, reflection.RESPONSE))


def _parsed(message: str, data: bytes) -> dict[str, Any]:
    """Return a message of a standard service as a dictionary; raises as `parse`."""
    document: dict[str, Any] = json_format.MessageToDict(
        parse(message_class(message), data), preserving_proto_field_name=True
    )
    return document


_PROTOCOL: Final[dict[str, Method]] = {
    "ServerLive": _server_live,
    "ServerReady": _server_ready,
    "ModelReady": _model_ready,
    "ServerMetadata": _server_metadata,
    "ModelMetadata": _described("ModelMetadataResponse", lambda info, _: model_metadata(info)),
    "ModelConfig": _described(
        "ModelConfigResponse", lambda info, _: {"config": model_configuration(info)}
    ),
    "ModelStatistics": _described(
        "ModelStatisticsResponse",
        lambda info, service: model_statistics(info, service.metrics),
    ),
    "ModelInfer": _model_infer,
}

METHODS: Final = {f"/{GRPC_SERVICE}/{name}": method for name, method in _PROTOCOL.items()} | {
    f"/{GRPC_HEALTH_SERVICE}/Check": _check
}
"""Methods that answer with one message, by path."""

WATCH: Final = f"/{GRPC_HEALTH_SERVICE}/Watch"

STREAMS: Final[dict[str, Callable[[Service, Call], Awaitable[None]]]] = {
    WATCH: _watch,
    **dict.fromkeys(reflection.PATHS, _reflect),
}
"""Methods that answer with a stream, by path."""
