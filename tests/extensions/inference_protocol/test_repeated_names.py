"""Names that an object of a request in JSON has twice."""

import json
from typing import Any

import pytest

from service.errors import MalformedRequest
from service.extensions.inference_protocol.tensors import decode_request

TENSOR = {"name": "image", "datatype": "BYTES", "shape": [1], "data": ["aGk="]}


def with_parameters(value: object, separators: tuple[str, str]) -> bytearray:
    request = {"inputs": [TENSOR], "parameters": {"value": value}}
    return bytearray(json.dumps(request, separators=separators).encode())


@pytest.mark.parametrize(
    "value",
    [{":": ":"}, {"a": ": b", "c": [{"a": ':"', "b\\": "\\"}, '":']}, ' "a":', {"": {"": 1}}],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" , ", " : ")])
def test_colons_in_texts_are_no_names(value: Any, separators: tuple[str, str]) -> None:
    request = decode_request(with_parameters(value, separators), None)
    assert request.parameters == {"value": value}


@pytest.mark.parametrize(
    ("value", "message"), [(b"b", "'a' is given twice: send one"), (b"b" * 20_000, "a name twice")]
)
def test_repeated_name_is_refused(value: bytes, message: str) -> None:
    body = bytearray(b'{"inputs": [], "parameters": {"a": "a", "a" : "%b"}}' % value)
    with pytest.raises(MalformedRequest, match=message):
        decode_request(body, None)
