"""Messages are bounded before they are parsed."""

from __future__ import annotations

from contextlib import suppress

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from service.errors import MalformedRequest, UploadTooLarge
from service.web.grpc.messages import check_cost, decode_request
from service.web.grpc.open_inference_pb2 import InferParameter, ModelInferRequest

TENSORS = st.builds(
    ModelInferRequest.InferInputTensor,
    name=st.text(max_size=5),
    datatype=st.text(max_size=5),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
)
REQUESTS = st.builds(
    ModelInferRequest,
    model_name=st.text(max_size=5),
    id=st.text(max_size=200),
    inputs=st.lists(TENSORS, max_size=3),
    raw_input_contents=st.lists(st.binary(max_size=300), max_size=3),
)


@given(st.one_of(st.binary(max_size=60), REQUESTS.map(lambda request: request.SerializeToString()[:-1])))
def test_whatever_is_no_message_is_refused_as_such(data: bytes) -> None:
    with suppress(MalformedRequest):
        named, _ = decode_request(bytearray(data))
        assert ModelInferRequest.FromString(data).model_name == named.name  # what is read is what protobuf reads


@pytest.mark.parametrize(
    "message",
    [
        b"\x2a\x00" * 1_000_000,  # inputs without anything
        b"\x3a\x00" * 1_000_000,  # raw contents
        ModelInferRequest(inputs=[{"contents": {"bytes_contents": [b""] * 100_000}}]).SerializeToString(),
        ModelInferRequest(inputs=[{"contents": {"uint_contents": [1] * 1_000_001}}]).SerializeToString(),
        ModelInferRequest(parameters={str(i): InferParameter() for i in range(20_000)}).SerializeToString(),
        b"\x7a\x00" * 1_000_000,  # fields that are not known
    ],
    ids=["inputs", "raw", "elements", "numbers", "parameters", "unknown"],
)
def test_a_message_of_very_many_things_is_refused_before_it_is_parsed(message: bytes) -> None:
    with pytest.raises(UploadTooLarge):
        decode_request(bytearray(message))


@pytest.mark.parametrize(
    "message", [b"\x80" * 11, b"\x78" + b"\x80" * 10 + b"\x01", b"\x0a", b"\x0a\x05abc", b"\x09\x00", b"\x0b", b"\x0f"]
)
def test_broken_framing_is_refused(message: bytes) -> None:
    with pytest.raises(MalformedRequest):
        check_cost(memoryview(message), {})
    with pytest.raises(DecodeError):
        ModelInferRequest.FromString(message)
