"""Messages of gRPC as the requests and answers of `service.web.inference_protocol`.

A message is bounded before it is parsed: a few bytes may stand for a large object, and a message has millions.
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from service.errors import MalformedRequest, UploadTooLarge
from service.web.grpc.open_inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse, ModelRequest
from service.web.inference_protocol.tensors import InferenceHeader, InputTensor, OutputTensor, RequestedOutput

_RAW: Final = ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_DESCRIPTOR: Final = ModelInferRequest.DESCRIPTOR

# Wire types; of fields of a fixed size by their bytes.
_VARINT, _BYTES = 0, 2
_FIXED: Final = {1: 8, 5: 4}

_MAX_VARINT_BYTES: Final = 10

# About the time and memory of the largest JSON that is read: each byte of packed numbers costs 1.
_MAX_COST: Final = 1_000_000
_FIELD_COST: Final = 100
_TOO_MANY: Final = "the message has more fields or numbers than are read: send tensors as raw_input_contents"

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


def parse(kind: type[M], data: bytes) -> M:
    """Return a message; raises `MalformedRequest`."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MalformedRequest(f"not the message of this method: {error}") from None
    return message


def read_inference(data: bytes) -> InferenceMessage:
    """Return the request in a message; raises `MalformedRequest`, or what `split` raises."""
    rest, raw = split(memoryview(data), _RAW, _DESCRIPTOR)
    message = parse(ModelInferRequest, rest)
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


class _Field(NamedTuple):
    """A field of a message: its number and wire type, where it begins, and where its content starts and ends."""

    number: int
    wire_type: int
    begin: int
    start: int
    end: int


def _fields(message: memoryview) -> Iterator[_Field]:
    """Yield the fields of a message, without those of the messages within; raises `MalformedRequest`."""
    end = 0
    while (begin := end) < len(message):
        tag, start = _varint(message, begin)
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, end = _varint(message, start)
        elif wire_type == _BYTES:
            length, start = _varint(message, start)
            end = start + length
        elif wire_type in _FIXED:
            end = start + _FIXED[wire_type]
        else:
            raise MalformedRequest(f"not a message: wire type {wire_type}")
        if end > len(message):
            raise MalformedRequest("not a message: it ends within a field")
        yield _Field(tag >> 3, wire_type, begin, start, end)


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """Return a number of variable length, and where it ends."""
    value = 0
    for shift, byte in enumerate(message[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    raise MalformedRequest("not a message: it ends within a number")


def split(message: memoryview, number: int, descriptor: Any) -> tuple[bytes, list[memoryview]]:
    """Return a message without the field of bytes of this number, and the contents of that field, not copied.

    `descriptor` is protobuf's, of the message. Raises `MalformedRequest` if it is no message, or `UploadTooLarge` if it
    has very many fields or numbers.
    """
    rest, contents, cost = bytearray(), [], 0
    for field in _fields(message):
        if field.number == number and field.wire_type == _BYTES:
            contents.append(message[field.start : field.end])
            cost += _FIELD_COST
        else:
            rest += message[field.begin : field.end]
            cost = _cost(message, field, descriptor, cost)
        if cost > _MAX_COST:
            raise UploadTooLarge(_TOO_MANY)
    return bytes(rest), contents


def _cost(message: memoryview, field: _Field, descriptor: Any, cost: int) -> int:
    """Return the cost with a field and all that is within it; raises `UploadTooLarge` as soon as that is too much."""
    cost += _FIELD_COST
    known = descriptor.fields_by_number.get(field.number)
    if known is not None and field.wire_type == _BYTES:
        if known.message_type is not None:
            content = message[field.start : field.end]
            for inner in _fields(content):
                cost = _cost(content, inner, known.message_type, cost)
        elif known.type not in (known.TYPE_STRING, known.TYPE_BYTES):  # numbers, packed
            cost += field.end - field.start
    if cost > _MAX_COST:
        raise UploadTooLarge(_TOO_MANY)
    return cost
