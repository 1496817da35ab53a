"""Converts between gRPC messages and the requests and answers of `tensors`.

A message is checked before it is parsed, because a few of its millions of bytes may encode a large
object. https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from google.protobuf.message import DecodeError, Message

from service.errors import MalformedRequest, UploadTooLarge
from service.extensions.inference_protocol import VERSION
from service.extensions.inference_protocol.grpc.descriptors import message_class
from service.extensions.inference_protocol.tensors import (
    InferenceRequest,
    InputTensor,
    OutputTensor,
    RequestedOutput,
)

ModelRequest: Final = message_class("ModelRequest")
ModelInferRequest: Final = message_class("ModelInferRequest")
ModelInferResponse: Final = message_class("ModelInferResponse")

_Fields = Mapping[int, Any]

_TENSORS: Final[_Fields] = {7: None, 5: {5: {8: None}}, 6: {}}
"""Numbers of the fields with bytes of tensors, `raw_input_contents` and
`inputs.contents.bytes_contents`, and of `outputs`, a message whose fields are counted.
"""

_VARINT: Final = 0
_BYTES: Final = 2
_FIXED: Final = {1: 8, 5: 4}
"""Sizes of wire types with a fixed size."""

_MAX_VARINT_BYTES: Final = 10

_MAX_COST: Final = 1_000_000
"""About the time and memory of the largest accepted JSON: each byte outside tensors costs 1."""

_FIELD_COST: Final = 1000


def parse(kind: type[Message], data: bytes | bytearray, tensors: _Fields | None = None) -> Any:
    """Return a message.

    Args:
        tensors: see `check_cost`; by default the message has no tensors.

    Raises:
        MalformedRequest: the bytes are not such a message.
        UploadTooLarge: the message has too many fields or numbers.
    """
    check_cost(memoryview(data), tensors or {})
    message = kind()
    try:
        message.ParseFromString(bytes(data))
    except DecodeError as error:
        raise MalformedRequest(f"not the message of this method: {error}") from None
    return message


def decode_request(data: bytearray) -> tuple[Any, InferenceRequest]:
    """Return the requested model and the request of a message; drop the message's bytes.

    Raises:
        MalformedRequest: the bytes are not a valid message.
        UploadTooLarge: the message has too many fields or numbers.
    """
    message = parse(ModelInferRequest, data, _TENSORS)
    data.clear()
    contents = list(message.raw_input_contents)
    if contents and len(contents) != len(message.inputs):
        raise MalformedRequest(
            f"{len(contents)} raw_input_contents, and {len(message.inputs)} inputs"
        )
    inputs = []
    for position, tensor in enumerate(message.inputs):
        content: Any = memoryview(contents[position]) if contents else None
        if tensor.HasField("contents"):
            if contents:
                raise MalformedRequest(
                    f"input {tensor.name!r:.80} has contents in addition to raw_input_contents"
                )
            typed = tensor.contents
            content = list(
                typed.bytes_contents if tensor.datatype == "BYTES" else typed.uint_contents
            )
        parameters = _parameters(tensor.parameters)
        raw_bytes = len(contents[position]) if contents else None
        if parameters.get("binary_data_size", raw_bytes) != raw_bytes:
            raise MalformedRequest(
                f"input {tensor.name!r:.80}: binary_data_size is not the size of its raw contents: "
                "omit it, because it is for HTTP"
            )
        inputs.append(
            InputTensor(tensor.name, tensor.datatype, list(tensor.shape), content, parameters)
        )
    outputs = [
        RequestedOutput(output.name, _parameters(output.parameters)) for output in message.outputs
    ]
    parameters = _parameters(message.parameters)
    for each in (parameters, *(output.parameters for output in outputs)):
        for name in ("binary_data_output", "binary_data"):
            if each.get(name) is False:
                raise MalformedRequest(f"{name} is false: outputs are raw in gRPC: omit it")
    named = ModelRequest(name=message.model_name, version=message.model_version)
    return named, InferenceRequest(inputs, message.id or None, outputs, parameters)


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {
        name: (value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()
    }
    return {name: getattr(value, kind) if kind else None for name, (value, kind) in chosen.items()}


def encode_answer(model: str, request_id: str | None, outputs: Sequence[OutputTensor]) -> bytes:
    """Return the encoded answer of a model; its tensors are raw, like Triton's."""
    response = ModelInferResponse(
        model_name=model,
        model_version=VERSION,
        id=request_id or "",
        outputs=[
            ModelInferResponse.InferOutputTensor(
                name=output.name, datatype=output.datatype, shape=list(output.values.shape)
            )
            for output in outputs
        ],
        raw_output_contents=[output.raw() for output in outputs],
    )
    return bytes(response.SerializeToString())


def check_cost(message: memoryview, tensors: _Fields, cost: int = 0) -> int:
    """Return `cost` plus the cost of a message; bytes of its fields `tensors` are free.

    Raises:
        UploadTooLarge: the cost exceeds its limit.
        MalformedRequest: the bytes are not a message.
    """
    for number, content in _fields(message):
        cost += _FIELD_COST
        within = tensors.get(number)
        if within is not None:
            cost = check_cost(content, within, cost)
        elif number not in tensors:
            cost += len(content)
        if cost > _MAX_COST:
            raise UploadTooLarge(
                "the message has more fields or numbers than allowed: "
                "send tensors as raw_input_contents"
            )
    return cost


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield number and content of each field of a message; raises `MalformedRequest`."""
    end = 0
    while end < len(message):
        tag, start = _varint(message, end)
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
        yield tag >> 3, message[start:end]


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """Return a number of variable length, and the position of its end."""
    if position < len(message) and message[position] < 0x80:  # most have one byte
        return message[position], position + 1
    value = 0
    for shift, byte in enumerate(message[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    raise MalformedRequest("not a message: it ends within a number")
