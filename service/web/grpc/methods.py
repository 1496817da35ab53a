"""The methods of the service `inference.GRPCInferenceService`; each takes a call and returns its encoded answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.message import Message
from starlette.types import Receive

from service.engine.messages import ModelInfo
from service.errors import NotFound, Unavailable
from service.web.grpc.calls import Call, Method
from service.web.grpc.messages import encode_response, parse, read_inference
from service.web.grpc.open_inference_pb2 import (
    ModelConfigResponse,
    ModelMetadataResponse,
    ModelReadyResponse,
    ModelRequest,
    ModelStatisticsResponse,
    ServerLiveResponse,
    ServerMetadataResponse,
    ServerReadyResponse,
)
from service.web.inference_protocol import VERSION
from service.web.inference_protocol.descriptions import (
    model_configuration,
    model_metadata,
    model_statistics,
    server_metadata,
)
from service.web.inference_protocol.inference import find_model, infer, read_inputs
from service.web.request import Service
from vitserve import __version__


def _encode(document: Mapping[str, Any], message: Message) -> bytes:
    """Return a document of the protocol, which is the same over HTTP, as a message."""
    return bytes(json_format.ParseDict(document, message).SerializeToString())


async def _server_live(service: Service, call: Call) -> bytes:
    return _encode({"live": True}, ServerLiveResponse())  # the message is not read, as its caller may have no key


async def _server_ready(service: Service, call: Call) -> bytes:
    return _encode({"ready": _is_ready(service)}, ServerReadyResponse())


async def _model_ready(service: Service, call: Call) -> bytes:
    question = parse(ModelRequest, await call.question())
    return _encode({"ready": _is_ready(service, question.name, question.version)}, ModelReadyResponse())


def _is_ready(service: Service, name: str | None = None, version: str = "") -> bool:
    try:
        service.check_open()
        find_model(service, name, version)
    except (NotFound, Unavailable):
        return False
    return True


async def _server_metadata(service: Service, call: Call) -> bytes:
    await call.question()
    return _encode(server_metadata(__version__, swaps=False), ServerMetadataResponse())


def _described(describe: Callable[[ModelInfo, Service], Mapping[str, Any]], kind: type[Message]) -> Method:
    """Return the method that describes the model that a question names; an empty name is any."""

    async def method(service: Service, call: Call) -> bytes:
        question = parse(ModelRequest, await call.question())
        info = find_model(service, question.name or None, question.version).info
        return _encode(describe(info, service), kind())

    return method


async def _model_infer(service: Service, call: Call) -> bytes:
    """Classify the pictures of the tensor `image` or `pixels`."""
    service.check_room()
    async with service.admit_from(call.caller, call.started, service.model()) as admitted:
        admitted.source, admitted.watches = call.receive, False  # grpcio cancels the call itself
        async with call.arrival():  # before its turn a message cannot crawl
            message = read_inference(await admitted.read(_whole))
        info = find_model(service, message.name, message.version).info
        header = message.header
        inputs = read_inputs(header, message.raw, info, limit=service.settings.max_images_per_request)
        del message  # its bytes are copied, or held by the pixels
        return await infer(admitted, header, inputs, partial(encode_response, info.name, VERSION, header.id))


async def _whole(receive: Receive) -> bytes:
    body: bytes = (await receive())["body"]
    return body


METHODS: Final[dict[str, Method]] = {
    "ServerLive": _server_live,
    "ServerReady": _server_ready,
    "ModelReady": _model_ready,
    "ServerMetadata": _server_metadata,
    "ModelMetadata": _described(lambda info, _: model_metadata(info), ModelMetadataResponse),
    "ModelConfig": _described(lambda info, _: {"config": model_configuration(info)}, ModelConfigResponse),
    "ModelStatistics": _described(
        lambda info, service: model_statistics(info, service.metrics), ModelStatisticsResponse
    ),
    "ModelInfer": _model_infer,
}

PUBLIC: Final = frozenset({"ServerLive", "ServerReady"})
"""Methods that need no key."""
