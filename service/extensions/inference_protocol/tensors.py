"""Requests and answers of the protocol, and their form over HTTP: JSON, followed by raw tensors.

In a raw tensor, each BYTES element follows its length (4 bytes, little endian). Numbers are little
endian, in row-major order.
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

import json
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidParameter, MalformedRequest, UploadTooLarge
from service.extensions.inference_protocol import VERSION
from service.unique_names import DuplicateName, unique_names
from service.web.base64_pictures import bare_base64, picture_of_base64
from service.web.json_bodies import explained
from service.web.upload import remove_mark

_LENGTH: Final = struct.Struct("<I")
_MAX_ELEMENTS: Final = 1 << 40
_MAX_DIMENSIONS: Final = 8
_UINT8: Final = list[Annotated[int, msgspec.Meta(ge=0, le=255)]]

_MAX_JSON_VALUES: Final = 500_000
"""Enough for two pictures of 224 pixels. A list takes 20 times the memory of its text."""

_SMALL_BYTES: Final = 1 << 14
"""Documents up to this size are parsed again for the message about a repeated name."""

# The quote after a name. A quote before a text follows a bracket, comma, colon or space. `re` finds
# quotes fast because the pattern begins with one.
_NAME_END: Final = re.compile(rb'"(?<![\[{,:\s\\]")\s*:')

Parameters = dict[str, Any]


class InputTensor(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor of a request.

    Attributes:
        data: list of values, nested or flat, or the tensor's bytes as a memoryview. In JSON, files
            are base64.
    """

    name: str
    datatype: str
    shape: list[int]
    data: Any = None
    parameters: Parameters = {}

    def files(self) -> list[bytearray]:
        """Move the elements of a BYTES tensor out of `data`; raises `MalformedRequest`."""
        count = self._elements()
        files: list[bytearray] = []
        if isinstance(self.data, memoryview):
            rest = self.data
            self.data = None
            while rest and len(files) <= count:  # `_check` refuses a surplus
                size = _LENGTH.unpack_from(rest)[0] if len(rest) >= _LENGTH.size else len(rest)
                if len(rest) < _LENGTH.size + size:
                    raise MalformedRequest(
                        f"input {self.name!r}: element {len(files)} is longer than the rest of the "
                        "data; each begins with its length in bytes, uint32 in little-endian order"
                    )
                files.append(bytearray(rest[_LENGTH.size : _LENGTH.size + size]))
                rest = rest[_LENGTH.size + size :]
        else:
            flat = self._flat()
            self.data = None
            for position, content in enumerate(flat):
                flat[position] = None
                try:
                    files.append(
                        picture_of_base64(bare_base64(content))
                        if isinstance(content, str)
                        else bytearray(memoryview(content))
                    )
                except (TypeError, ValueError) as error:
                    wrong = "not a string in base64" if isinstance(error, TypeError) else error
                    raise MalformedRequest(
                        f"input {self.name!r}: element {position} is {wrong}"
                    ) from None
        self._check(len(files), count)
        return files

    def pixels(self) -> NDArray[np.uint8]:
        """Return a UINT8 tensor as an array, a view of raw data; raises `MalformedRequest`."""
        count = self._elements()
        flat = self.data
        if not isinstance(flat, memoryview):
            try:
                flat = bytearray(msgspec.convert(self._flat(), _UINT8))
            except msgspec.ValidationError:
                raise MalformedRequest(
                    f"input {self.name!r}: the data are not integers from 0 to 255; "
                    "multiply values from 0 to 1 by 255"
                ) from None
        self._check(len(flat), count)
        return np.frombuffer(flat, np.uint8).reshape(self.shape)

    def _flat(self) -> list[Any]:
        """Return the data without their nesting; raises `MalformedRequest` for uneven nesting."""
        flat: list[Any] = self.data
        while flat and isinstance(flat[0], list):
            if not all(isinstance(row, list) for row in flat):
                raise MalformedRequest(f"input {self.name!r}: the data are not evenly nested")
            flat = list(chain.from_iterable(flat))
        return flat

    def _elements(self) -> int:
        """Return the size of the shape; raises `InvalidParameter` or `MalformedRequest`."""
        sides = self.shape[: _MAX_DIMENSIONS + 1]
        if (
            not 1 <= len(sides) <= _MAX_DIMENSIONS
            or min(sides) < 0
            or math.prod(sides) > _MAX_ELEMENTS
        ):
            raise InvalidParameter(
                f"input {self.name!r:.80}: {sides!s:.80} is not a shape of a tensor: "
                "its first side is the number of pictures"
            )
        if not isinstance(self.data, list | memoryview):
            raise MalformedRequest(f"input {self.name!r:.80}: the data are not a list")
        return math.prod(sides)

    def _check(self, count: int, expected: int) -> None:
        if count != expected:
            raise MalformedRequest(
                f"input {self.name!r}: {count} elements, and the shape is {self.shape}"
            )


class RequestedOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A selected output."""

    name: str
    parameters: Parameters = {}


class InferenceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for inference; over HTTP, it has this form in JSON."""

    inputs: list[InputTensor]
    id: str | None = None
    outputs: list[RequestedOutput] = []
    parameters: Parameters = {}


# msgspec's own parser of floats takes 10 us for 1e308, and a body may hold many.
_decode = msgspec.json.Decoder(InferenceRequest, float_hook=float).decode
_decode_any = msgspec.json.Decoder(float_hook=float).decode


_OBJECT: Final = re.compile(rb"\s*\{")


def _header_remedy(body: bytearray) -> str:
    """Return what to send instead of a body that is not JSON alone; empty for JSON."""
    if b'"binary_data_size"' in body:
        return ": binary tensors need the header Inference-Header-Content-Length, the JSON's bytes"
    if _OBJECT.match(body) is None:
        return (
            ": send JSON, not a form; or one picture alone, "
            "with the header Inference-Header-Content-Length: 0"
        )
    return ""


def _least_names(request: InferenceRequest) -> int:
    """Return the number of names that the JSON of a request has at least."""
    holders: list[InferenceRequest | InputTensor | RequestedOutput] = [request]
    holders += [*request.inputs, *request.outputs]
    parameters = [holder.parameters for holder in holders if holder.parameters]
    count = len(parameters) + _count_names(parameters)
    count += 3 * len(request.inputs) + sum(tensor.data is not None for tensor in request.inputs)
    return count + 1 + len(request.outputs) + (request.id is not None) + bool(request.outputs)


def _require_names_once(document: bytearray | memoryview, count: int) -> None:
    """Raise `MalformedRequest` if an object of a valid document has a name twice.

    Args:
        count: number of names that the parsed document has at least. The parser keeps only the last
            of equal names.
    """
    written = len(_NAME_END.findall(document))
    if written <= count or written <= _count_names(_decode_any(document)):
        return
    message = "an object has a name twice: send one"
    try:
        if len(document) <= _SMALL_BYTES:
            json.loads(bytes(document), object_pairs_hook=unique_names)
    except DuplicateName as error:
        message = str(error)
    raise MalformedRequest(f"not the JSON of an inference request: {message}")


def _count_names(value: Any) -> int:
    """Return the number of names in the objects of a parsed document."""
    if isinstance(value, dict):
        return len(value) + sum(map(_count_names, value.values()))
    if isinstance(value, list):
        return sum(map(_count_names, value))
    return 0


def decode_request(body: bytearray, header_length: int | None) -> InferenceRequest:
    """Return the request in a body.

    Args:
        body: JSON, followed by raw tensors; or one picture.
        header_length: bytes of the JSON; None for the whole body, 0 for a picture.

    Raises:
        MalformedRequest: the body does not follow the protocol.
        UploadTooLarge: the JSON holds too many values.
    """
    if header_length == 0:
        return InferenceRequest(
            [InputTensor("image", "BYTES", [1], [body])], parameters={"binary_data_output": True}
        )
    if header_length is None:
        remove_mark(body)
    whole = memoryview(body)
    length = len(whole) if header_length is None else header_length
    if length > len(whole):
        raise MalformedRequest(
            f"Inference-Header-Content-Length is {length}, and the body has {len(whole)} bytes"
        )
    # Count before parsing. Marks inside strings count, too, but base64 does not contain them.
    if sum(body.count(mark, 0, length) for mark in (b",", b"[", b"{")) > _MAX_JSON_VALUES:
        raise UploadTooLarge(
            f"the JSON holds more than {_MAX_JSON_VALUES} values: send tensors in binary"
        )
    try:
        request = _decode(whole[:length])
        _require_names_once(whole[:length], _least_names(request))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        wrong = explained(error, InferenceRequest)
        remedy = "" if header_length else _header_remedy(body)
        raise MalformedRequest(f"not the JSON of an inference request: {wrong}{remedy}") from None
    rest = whole[length:]
    for tensor in request.inputs:
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            continue
        if not isinstance(size, int) or not 0 <= size <= len(rest):
            raise MalformedRequest(
                f"input {tensor.name!r}: binary_data_size {size!r:.40}, "
                f"and {len(rest)} bytes are left"
            )
        tensor.data = rest[:size]
        rest = rest[size:]
    if rest:
        raise MalformedRequest(f"{len(rest)} bytes follow the last tensor")
    return request


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of an answer.

    Attributes:
        values: array of int64, float32, bool, or str objects.
        binary: whether its bytes follow the JSON.
    """

    name: str
    values: NDArray[Any]
    binary: bool

    @property
    def datatype(self) -> str:
        """Return the datatype on the wire; texts are BYTES."""
        return {"O": "BYTES", "b": "BOOL", "i": "INT64", "f": "FP32"}[self.values.dtype.kind]

    def raw(self) -> bytes:
        """Return the bytes of a raw tensor."""
        if self.datatype != "BYTES":
            dtype = {"BOOL": "?", "INT64": "<i8", "FP32": "<f4"}[self.datatype]
            return self.values.astype(dtype).tobytes()
        encoded = [text.encode() for text in self.values.ravel().tolist()]
        return b"".join(_LENGTH.pack(len(text)) + text for text in encoded)

    def values_in_json(self) -> list[Any]:
        """Return the values; a float32 gets its shortest decimal, 0.83 instead of 0.8299999833."""
        values = self.values.ravel()
        if self.datatype == "FP32":
            return [float(str(value)) for value in values]
        return values.tolist()


def encode_answer(
    model: str, request_id: str | None, outputs: Sequence[OutputTensor]
) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the length of its JSON if raw tensors follow it."""
    documents = []
    binary = []
    for output in outputs:
        document: dict[str, Any] = {
            "name": output.name,
            "datatype": output.datatype,
            "shape": output.values.shape,
        }
        if output.binary:
            binary.append(output.raw())
            document["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            document["data"] = output.values_in_json()
        # The encoder holds the interpreter's lock, so encode one output at a time.
        documents.append(msgspec.Raw(msgspec.json.encode(document)))
    header = {"model_name": model, "model_version": VERSION, "outputs": documents}
    if request_id is not None:
        header["id"] = request_id
    content = msgspec.json.encode(header)
    return content + b"".join(binary), len(content) if binary else None
