"""Tensors as the protocol sends them: in JSON, or as raw bytes behind the JSON.

A BYTES element is preceded by its length, 4 bytes little endian; numbers are little endian, in row-major order.
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Iterable
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidParameter, MalformedRequest, UploadTooLarge

_LENGTH: Final = struct.Struct("<I")
_BASE64_PIECE: Final = 1 << 20
_MAX_ELEMENTS: Final = 1 << 40
_MAX_DIMENSIONS: Final = 8

_MAX_JSON_VALUES: Final = 500_000
"""Two pictures of 224 pixels as numbers. A list takes 20 times its text."""

Parameters = dict[str, Any]


class InputTensor(msgspec.Struct, frozen=True):
    """A tensor of a request; `data` stands in the JSON (over gRPC in the message), or its bytes behind it."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: Parameters = {}

    @property
    def elements(self) -> int:
        """Return the number of elements of the shape; raises `InvalidParameter` for a shape that is none."""
        sides = self.shape[: _MAX_DIMENSIONS + 1]
        if not 1 <= len(sides) <= _MAX_DIMENSIONS or min(sides) < 0 or math.prod(sides) > _MAX_ELEMENTS:
            raise InvalidParameter(f"input {self.name!r:.80}: shape {sides!s:.80} is not one of a tensor")
        return math.prod(sides)


class RequestedOutput(msgspec.Struct, frozen=True):
    """An output that a request selects."""

    name: str
    parameters: Parameters = {}


class InferenceHeader(msgspec.Struct, frozen=True):
    """The JSON of an inference request."""

    inputs: list[InputTensor]
    id: str | None = None
    outputs: list[RequestedOutput] = []
    parameters: Parameters = {}


# Its own reader of floats takes 10 us for 1e308, and a body holds many.
_decode = msgspec.json.Decoder(InferenceHeader, float_hook=float).decode


def split_body(body: bytearray, header_length: int | None) -> tuple[InferenceHeader, memoryview]:
    """Return the JSON of a request, `header_length` bytes or all, and the bytes behind it.

    Raises `MalformedRequest`, or `UploadTooLarge` if the JSON holds very many values.
    """
    whole = memoryview(body)
    length = len(whole) if header_length is None else header_length
    if length > len(whole):
        raise MalformedRequest(f"Inference-Header-Content-Length is {length}, and the body has {len(whole)} bytes")
    # Counted before they are parsed. Marks within strings count too, and base64 has none of these.
    if sum(body.count(mark, 0, length) for mark in (b",", b"[", b"{")) > _MAX_JSON_VALUES:
        raise UploadTooLarge(f"the JSON holds more than {_MAX_JSON_VALUES} values: send tensors in binary")
    try:
        return _decode(whole[:length]), whole[length:]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedRequest(f"not the JSON of an inference request: {error}") from None
    except RecursionError:
        raise MalformedRequest("not the JSON of an inference request: it is nested too deeply") from None


def take_binary(tensors: Iterable[InputTensor], rest: memoryview) -> dict[str, memoryview]:
    """Return the bytes of the tensors whose data follow the JSON, by name; raises `MalformedRequest`."""
    binary = {}
    for tensor in tensors:
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            continue
        if not isinstance(size, int) or size < 0 or size > len(rest):
            raise MalformedRequest(
                f"input {tensor.name!r}: binary_data_size {size!r:.40}, and {len(rest)} bytes are left"
            )
        binary[tensor.name], rest = rest[:size], rest[size:]
    if len(rest):
        raise MalformedRequest(f"{len(rest)} bytes follow the last tensor")
    return binary


def bytes_elements(tensor: InputTensor, binary: memoryview | None) -> list[bytearray]:
    """Return the elements of a BYTES tensor; in JSON they are base64, in a message of gRPC they are bytes.

    Each element is removed from the header, whose bytes are not counted. Raises `MalformedRequest`.
    """
    elements = _from_header(tensor) if binary is None else _from_binary(tensor, binary)
    if len(elements) != tensor.elements:
        raise MalformedRequest(f"input {tensor.name!r}: {len(elements)} elements, and the shape is {tensor.shape}")
    return elements


def _from_header(tensor: InputTensor) -> list[bytearray]:
    elements: list[bytearray] = []
    data = tensor.data or []
    for position, text in enumerate(data):
        data[position] = None
        try:
            elements.append(bytearray(text) if isinstance(text, bytes) else _from_base64(text))
        except (TypeError, ValueError, binascii.Error):
            raise MalformedRequest(f"input {tensor.name!r}: element {position} is not a string in base64") from None
    data.clear()
    return elements


def _from_base64(text: object) -> bytearray:
    """Return the bytes of a text in base64; raises `TypeError` or `ValueError`.

    The decoder holds the interpreter until it is done, so it gets the text in pieces.
    """
    if not isinstance(text, str):
        raise TypeError(type(text))
    data = bytearray()
    for start in range(0, len(text), _BASE64_PIECE):
        if data and len(data) % 3:
            raise ValueError("padding before the end")
        data += base64.b64decode(text[start : start + _BASE64_PIECE], validate=True)
    return data


def _from_binary(tensor: InputTensor, binary: memoryview) -> list[bytearray]:
    elements: list[bytearray] = []
    while len(binary) and len(elements) <= tensor.elements:  # `bytes_elements` refuses a surplus
        size = _LENGTH.unpack_from(binary)[0] if len(binary) >= _LENGTH.size else len(binary)
        if len(binary) < _LENGTH.size + size:
            raise MalformedRequest(f"input {tensor.name!r}: element {len(elements)} has more bytes than there are")
        elements.append(bytearray(binary[_LENGTH.size : _LENGTH.size + size]))
        binary = binary[_LENGTH.size + size :]
    return elements


def uint8_elements(tensor: InputTensor, binary: memoryview | None) -> NDArray[np.uint8]:
    """Return a UINT8 tensor as an array of its shape, or raise `MalformedRequest`.

    Its numbers are removed from the header.
    """
    if binary is None:
        try:
            if not _are_integers(tensor.data or []):
                raise ValueError
            values = np.asarray(tensor.data)
            if values.dtype.kind not in "iu" or (values.size and not 0 <= values.min() <= values.max() <= 255):
                raise ValueError
        except (ValueError, TypeError, OverflowError):
            raise MalformedRequest(f"input {tensor.name!r}: the data are not numbers from 0 to 255") from None
        flat = values.astype(np.uint8).ravel()
        (tensor.data or []).clear()
    else:
        flat = np.frombuffer(binary, np.uint8)
    if flat.size != tensor.elements:
        raise MalformedRequest(f"input {tensor.name!r}: {flat.size} elements, and the shape is {tensor.shape}")
    return flat.reshape(tensor.shape)


def _are_integers(data: list[Any]) -> bool:
    """Return whether nested lists hold nothing but integers; raises `TypeError` if some are no lists.

    NumPy would make an array of strings, each as long as the longest: gigabytes of a small request.
    """
    while data and isinstance(data[0], list):
        data = list(chain.from_iterable(data))
    return all(type(value) is int for value in data)


class OutputTensor:
    """A tensor of an answer, of int64, float32, or of objects that are str, which are sent as BYTES.

    The bytes of a `binary` tensor follow the JSON.
    """

    def __init__(self, name: str, values: NDArray[Any], *, binary: bool) -> None:
        self.name = name
        self.datatype = {"O": "BYTES", "i": "INT64", "f": "FP32"}[values.dtype.kind]
        self.shape = list(values.shape)
        self._values = values
        self.binary = self.raw() if binary else None

    def raw(self) -> bytes:
        """Return its bytes."""
        if self.datatype != "BYTES":
            return self._values.astype({"INT64": "<i8", "FP32": "<f4"}[self.datatype]).tobytes()
        encoded = [text.encode() for text in self._values.ravel().tolist()]
        return b"".join(_LENGTH.pack(len(text)) + text for text in encoded)

    def document(self) -> dict[str, Any]:
        """Return what the JSON says of it."""
        named = {"name": self.name, "datatype": self.datatype, "shape": self.shape}
        if self.binary is not None:
            return {**named, "parameters": {"binary_data_size": len(self.binary)}}
        values = self._values.ravel()
        # The shortest decimal that is the same float32: 0.83 and not 0.8299999833.
        return {
            **named,
            "data": [float(str(value)) for value in values] if self.datatype == "FP32" else values.tolist(),
        }


def encode_answer(
    model: str, version: str, request_id: str | None, outputs: list[OutputTensor]
) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the length of its JSON if bytes follow it."""
    # The encoder holds the interpreter until it is done, so it gets one output at a time.
    documents = [msgspec.Raw(msgspec.json.encode(output.document())) for output in outputs]
    header: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": documents}
    if request_id is not None:
        header["id"] = request_id
    document = msgspec.json.encode(header)
    binary = [output.binary for output in outputs if output.binary is not None]
    if not binary:
        return document, None
    return document + b"".join(binary), len(document)
