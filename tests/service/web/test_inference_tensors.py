"""Tensors of the Open Inference Protocol at the edges of what is allowed."""

from __future__ import annotations

import json
import struct

import msgspec
import numpy as np
import pytest

from model.outputs import AttentionMap, MapRequest, Outputs
from service.engine.messages import InferenceResult
from service.errors import InvalidParameter, MalformedRequest, TooManyImages, UploadTooLarge
from service.web.inference_protocol.inference import Selection, make_outputs, read_inputs
from service.web.inference_protocol.tensors import (
    InferenceHeader,
    InputTensor,
    OutputTensor,
    RequestedOutput,
    bytes_elements,
    encode_answer,
    split_body,
    take_binary,
    uint8_elements,
)
from tests.service.fakes import model_info


def image(*shape: int, size: int | None = None) -> InputTensor:
    return InputTensor("image", "BYTES", list(shape), parameters={} if size is None else {"binary_data_size": size})


def elements(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


@pytest.mark.parametrize("shape", [[], [-1], [3, -1], [1] * 9, [(1 << 40) + 1], [1 << 63, 1 << 63]])
def test_a_shape_of_no_tensor_is_refused(shape: list[int]) -> None:
    with pytest.raises(InvalidParameter, match="not one of a tensor"):
        _ = image(*shape).elements


@pytest.mark.parametrize("mark", [b",", b"[", b"{"])
def test_half_a_million_values_of_json_are_read_and_no_more(mark: bytes) -> None:
    with pytest.raises(MalformedRequest):
        split_body(bytearray(mark * 500_000), None)
    with pytest.raises(UploadTooLarge, match="500000 values"):
        split_body(bytearray(mark * 500_001), None)


@pytest.mark.parametrize("rest", [b"", b"," * 500_001])
def test_what_stands_behind_the_json_is_no_json(rest: bytes) -> None:
    document = b'{"inputs":[]}'
    header, behind = split_body(bytearray(document + rest), len(document))
    assert header == InferenceHeader([])
    assert bytes(behind) == rest


def test_tensors_with_bytes_behind_the_json_share_them_in_order() -> None:
    first, without, empty, last = (
        InputTensor(name, "BYTES", [1], parameters={} if size is None else {"binary_data_size": size})
        for name, size in {"first": 2, "without": None, "empty": 0, "last": 3}.items()
    )
    found = take_binary([first, without, empty, last], memoryview(b"aabbb"))
    assert {name: bytes(data) for name, data in found.items()} == {"first": b"aa", "empty": b"", "last": b"bbb"}


@pytest.mark.parametrize(("size", "given"), [(3, b"aa"), (1, b"aa"), (None, b"a"), (-1, b"a"), ("1", b"a")])
def test_bytes_that_are_fewer_or_more_than_claimed_are_refused(size: object, given: bytes) -> None:
    tensor = InputTensor("image", "BYTES", [1], parameters={"binary_data_size": size})
    with pytest.raises(MalformedRequest):
        take_binary([tensor], memoryview(given))


@pytest.mark.parametrize("data", [b"\1\0\0\0", b"\2\0\0\0a", b"\0\0\0", b"\0\0\0\0\0"])
def test_an_element_that_is_cut_off_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedRequest, match="more bytes than there are"):
        bytes_elements(image(2), memoryview(data))


def test_numbers_of_a_byte_are_those_from_0_to_255() -> None:
    tensor = InputTensor("pixels", "UINT8", [1, 2], [[0, 255]])
    assert uint8_elements(tensor, None).tolist() == [[0, 255]]
    assert uint8_elements(tensor, memoryview(b"\0\xff")).tolist() == [[0, 255]]
    for data in ([0, 256], [-1, 0], [0.0, 1.0], [True, False], ["0", "1"], [2**70, 0], None):
        with pytest.raises(MalformedRequest, match="0 to 255"):
            uint8_elements(msgspec.structs.replace(tensor, data=data), None)
    for binary in (b"\0", b"\0\0\0"):
        with pytest.raises(MalformedRequest, match="elements"):
            uint8_elements(tensor, memoryview(binary))


PAIR = memoryview(elements(b"", b""))


def test_a_request_has_at_most_so_many_pictures() -> None:
    assert len(read_inputs(InferenceHeader([image(2, size=8)]), {"image": PAIR}, model_info(), limit=2)) == 2
    assert len(read_inputs(InferenceHeader([image(2, 1, size=8)]), {"image": PAIR}, model_info(), limit=2)) == 2
    with pytest.raises(InvalidParameter, match=r"shape \[N\]"):
        read_inputs(InferenceHeader([image(1, 2, size=8)]), {"image": PAIR}, model_info(), limit=2)
    with pytest.raises(TooManyImages, match="3 pictures: at most 2"):
        read_inputs(InferenceHeader([image(3, size=8)]), {"image": PAIR}, model_info(), limit=2)


def selection(*outputs: RequestedOutput, classes: int = 10, binary: bool = False, **parameters: object) -> Selection:
    info = model_info(config=model_info().config.model_copy(update={"num_classes": classes}))
    return Selection.of(InferenceHeader([], outputs=list(outputs), parameters=parameters), info, binary=binary)


def output(name: str, **parameters: object) -> RequestedOutput:
    return RequestedOutput(name, parameters)


RESULTS = [
    InferenceResult(
        Outputs(np.array(scores, np.float32), np.array(indices), AttentionMap(MapRequest.row(2), values, 0.9)),
        1,
        0.001,
        0.002,
    )
    for scores, indices, values in [
        ((0.83, 0.125), (2, 0), np.eye(2, dtype=np.float32)),
        ((0.5, 0.25), (1, 2), np.ones((2, 2), np.float32)),
    ]
]


def made(selected: Selection) -> dict[str, OutputTensor]:
    return {each.name: each for each in make_outputs(RESULTS, selected, ["cat", "d\xf6g", "eel"])}


def test_an_answer_has_its_document_and_then_the_bytes_of_its_tensors_in_order() -> None:
    asked = [output("index", binary_data=True), output("score"), output("label", binary_data=True), output("attention")]
    outputs = make_outputs(RESULTS, selection(*asked, top_k=2), ["cat", "d\xf6g", "eel"])
    content, length = encode_answer("m", "1", "mine", outputs)
    assert length is not None
    assert json.loads(content[:length]) == {
        "model_name": "m",
        "model_version": "1",
        "id": "mine",
        "outputs": [
            {"name": "index", "datatype": "INT64", "shape": [2, 2], "parameters": {"binary_data_size": 32}},
            {"name": "score", "datatype": "FP32", "shape": [2, 2], "data": [0.83, 0.125, 0.5, 0.25]},
            {"name": "label", "datatype": "BYTES", "shape": [2, 2], "parameters": {"binary_data_size": 29}},
            {"name": "attention", "datatype": "FP32", "shape": [2, 2, 2], "data": [1, 0, 0, 1, 1, 1, 1, 1]},
        ],
    }
    assert content[length:] == struct.pack("<4q", 2, 0, 1, 2) + elements(b"eel", b"cat", b"d\xc3\xb6g", b"eel")
