"""Messages of gRPC as the requests and answers of `service.web.inference_protocol`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError

from service.errors import MalformedRequest
from service.web.grpc.open_inference_pb2 import (
    InferParameter,
    ModelInferRequest,
    ModelInferResponse,
    ModelRequest,
)
from service.web.grpc.wire import split
from service.web.inference_protocol.tensors import InferenceHeader, InputTensor, OutputTensor, RequestedOutput

_RAW: Final = ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_DESCRIPTOR: Final = ModelInferRequest.DESCRIPTOR

M = TypeVar("M", ModelRequest, ModelInferRequest)


@dataclass(frozen=True)
class InferenceMessage:
    """A request for inference.

    Attributes:
        name, version: of the model; an empty version is any.
        header: what stands in the JSON of the same request over HTTP.
        raw: the bytes of each input whose tensor is raw, by name.
    """

    name: str
    version: str
    header: InferenceHeader
    raw: Mapping[str, memoryview]


def read_question(data: bytes) -> ModelRequest:
    """Return a message with a question about a model; raises `MalformedRequest`."""
    return _parse(ModelRequest, data)


def _parse(kind: type[M], data: bytes) -> M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MalformedRequest(f"not the message of this method: {error}") from None
    return message


def read_inference(data: bytes) -> InferenceMessage:
    """Return the request in a message.

    Raises:
        MalformedRequest: it is no message, or only some of its inputs have raw tensors.
        UploadTooLarge: see `service.web.grpc.wire`.
    """
    rest, raw = split(memoryview(data), _RAW, _DESCRIPTOR)
    message = _parse(ModelInferRequest, rest)
    if raw and len(raw) != len(message.inputs):
        raise MalformedRequest(f"{len(raw)} raw_input_contents, and {len(message.inputs)} inputs")
    header = InferenceHeader(
        [_input(tensor, raw=bool(raw)) for tensor in message.inputs],
        message.id or None,
        [RequestedOutput(output.name, _parameters(output.parameters)) for output in message.outputs],
        _parameters(message.parameters),
    )
    names = [tensor.name for tensor in message.inputs]
    return InferenceMessage(message.model_name, message.model_version, header, dict(zip(names, raw, strict=False)))


def _input(tensor: ModelInferRequest.InferInputTensor, *, raw: bool) -> InputTensor:
    data: list[Any] | None = None
    if tensor.HasField("contents"):
        if raw:
            raise MalformedRequest(f"input {tensor.name!r:.80} has contents beside raw_input_contents")
        data = list(tensor.contents.bytes_contents if tensor.datatype == "BYTES" else tensor.contents.uint_contents)
    return InputTensor(tensor.name, tensor.datatype, list(tensor.shape), data, _parameters(tensor.parameters))


def _parameters(parameters: Mapping[str, InferParameter]) -> dict[str, Any]:
    chosen = {name: (value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}
    return {name: getattr(value, kind) if kind else None for name, (value, kind) in chosen.items()}


def encode_response(model: str, version: str, request_id: str | None, outputs: Sequence[OutputTensor]) -> bytes:
    """Return the message that answers a request; its tensors are raw, as Triton's are."""
    response = ModelInferResponse(
        model_name=model,
        model_version=version,
        id=request_id or "",
        outputs=[
            ModelInferResponse.InferOutputTensor(name=output.name, datatype=output.datatype, shape=output.shape)
            for output in outputs
        ],
        raw_output_contents=[output.raw() for output in outputs],
    )
    return bytes(response.SerializeToString())
