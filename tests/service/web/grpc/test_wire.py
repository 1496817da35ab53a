"""Messages are bounded before they are parsed."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import MalformedRequest, UploadTooLarge
from service.web.grpc.messages import read_inference, split
from service.web.grpc.open_inference_pb2 import InferParameter, ModelInferRequest

RAW = ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER


def parts(message: bytes) -> tuple[bytes, list[bytes]]:
    rest, raw = split(memoryview(message), RAW, ModelInferRequest.DESCRIPTOR)
    return rest, [bytes(content) for content in raw]


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


@settings(max_examples=25)
@given(REQUESTS)
def test_raw_contents_are_split_off_and_all_else_is_kept(request_: ModelInferRequest) -> None:
    rest, raw = parts(request_.SerializeToString())
    assert raw == list(request_.raw_input_contents)
    request_.ClearField("raw_input_contents")
    assert ModelInferRequest.FromString(rest) == request_


@given(st.one_of(st.binary(max_size=60), REQUESTS.map(lambda request: request.SerializeToString()[:-1])))
def test_whatever_is_no_message_is_refused_as_such(data: bytes) -> None:
    try:
        found = read_inference(data)
    except MalformedRequest:
        return
    # What is read is what protobuf reads.
    assert ModelInferRequest.FromString(data).model_name == found.name


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
        read_inference(message)


def test_a_million_is_the_most_that_a_message_may_cost() -> None:
    def packed(count: int) -> bytes:
        return bytes(ModelInferRequest(inputs=[{"contents": {"uint_contents": [1] * count}}]).SerializeToString())

    assert len(parts(packed(1_000_000 - 3 * 100))[0]) > 999_700
    with pytest.raises(UploadTooLarge):
        parts(packed(1_000_000 - 3 * 100 + 1))


def test_numbers_of_fixed_length_that_are_not_known_are_kept() -> None:
    message = b"\x78" + b"\xff" * 9 + b"\x01\x79" + bytes(range(8)) + b"\x7d" + bytes(range(4)) + b"\x3a\x02ab"
    assert parts(message) == (message[:-4], [b"ab"])


@pytest.mark.parametrize(
    "message", [b"\x80" * 11, b"\x78" + b"\x80" * 10 + b"\x01", b"\x0a", b"\x0a\x05abc", b"\x09\x00", b"\x0b", b"\x0f"]
)
def test_broken_framing_is_refused(message: bytes) -> None:
    with pytest.raises(MalformedRequest):
        parts(message)
    with pytest.raises(DecodeError):
        ModelInferRequest.FromString(message)
