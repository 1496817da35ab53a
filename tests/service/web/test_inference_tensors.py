"""Tensors of the Open Inference Protocol at the edges of what is allowed."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

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


@pytest.mark.parametrize(
    ("shape", "count"), [([7], 7), ([0], 0), ([2, 0], 0), ([2, 3, 4], 24), ([1] * 8, 1), ([1 << 20, 1 << 20], 1 << 40)]
)
def test_a_shape_has_as_many_elements_as_its_product(shape: list[int], count: int) -> None:
    assert image(*shape).elements == count


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


def test_elements_are_as_many_as_the_shape_says_and_may_be_empty() -> None:
    assert bytes_elements(image(3), memoryview(elements(b"", b"ab", b""))) == [b"", b"ab", b""]
    assert bytes_elements(image(0), memoryview(b"")) == []
    for shape, data in [(1, elements(b"", b"")), (2, elements(b"")), (0, elements(b"")), (1, b"")]:
        with pytest.raises(MalformedRequest, match="elements"):
            bytes_elements(image(shape), memoryview(data))


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


def test_as_many_classes_are_wanted_as_any_output_needs() -> None:
    assert selection().requested.top_k == 5
    assert selection(classes=3).requested.top_k == 3
    assert selection(top_k=1).requested.top_k == 1
    assert selection(top_k=10).requested.top_k == 10
    assert selection(output("score", classification=4), top_k=2).requested.top_k == 4
    assert selection(output("score", classification=2)).requested.top_k == 2
    for count in (0, 11, -1, True, "1", 1.0):
        with pytest.raises(InvalidParameter, match=r"top_k .*expected 1 to 10"):
            selection(top_k=count)
        with pytest.raises(InvalidParameter, match=r"classification .*expected 1 to 10"):
            selection(output("score", classification=count))


def test_a_map_is_computed_for_those_alone_who_want_it() -> None:
    assert selection(attention="cls").requested.map is None
    assert selection(output("attention"), attention="cls").requested.map == MapRequest.row(2)
    assert selection(output("score"), output("attention")).requested.map == MapRequest("relevance")
    assert selection(output("evidence")).requested.map == MapRequest("relevance")
    with pytest.raises(InvalidParameter, match="evidence"):
        selection(output("evidence"), attention="cls")


def test_a_model_without_relevance_has_the_row_by_default() -> None:
    info = model_info(config=model_info().config.model_copy(update={"norm_order": "post"}))
    asked = InferenceHeader([], outputs=[output("attention")])
    assert Selection.of(asked, info).requested.map == MapRequest.row(2)
    with pytest.raises(InvalidParameter, match="attention 'relevance': expected one of cls"):
        Selection.of(InferenceHeader([], outputs=asked.outputs, parameters={"attention": "relevance"}), info)


def test_evidence_is_a_number_for_each_picture() -> None:
    maps = [AttentionMap(MapRequest("relevance", 1), np.eye(2, dtype=np.float32), 0.9, 0.5, each) for each in (1, 0.25)]
    outputs = Outputs(np.ones(1, np.float32), np.zeros(1, np.int64))
    results = [InferenceResult(replace(outputs, map=each), 1, 0.001, 0.002) for each in maps]
    [made_output] = make_outputs(results, selection(output("evidence")), ["cat"])
    assert (made_output.datatype, made_output.shape) == ("FP32", [2, 1])
    assert made_output.raw() == struct.pack("<2f", 1, 0.25)


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


def test_each_output_is_sent_as_it_asks_or_else_as_the_request_does() -> None:
    asked = [output("label", binary_data=True), output("index"), output("score", binary_data=False)]
    for by_default in (selection(*asked, top_k=2, binary=True), selection(*asked, top_k=2, binary_data_output=True)):
        assert [each.binary is not None for each in made(by_default).values()] == [True, True, False]
    in_json = made(selection(*asked, top_k=2, binary=True, binary_data_output=False))
    assert [each.binary is not None for each in in_json.values()] == [True, False, False]


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


def test_an_answer_without_bytes_or_id_is_its_document() -> None:
    content, length = encode_answer("m", "1", None, make_outputs(RESULTS, selection(output("index")), ["a", "b", "c"]))
    assert length is None
    assert json.loads(content) == {
        "model_name": "m",
        "model_version": "1",
        "outputs": [{"name": "index", "datatype": "INT64", "shape": [2, 2], "data": [2, 0, 1, 2]}],
    }


def test_a_classification_has_the_first_so_many_of_each_picture() -> None:
    found = made(selection(output("score", classification=1), output("label"), top_k=2))
    assert found["score"].document()["data"] == ["0.830000:2:eel", "0.500000:1:d\xf6g"]
    assert found["score"].shape == [2, 1]
    assert found["label"].shape == [2, 2]
    scores = made(selection(output("score", binary_data=True)))["score"]
    assert np.frombuffer(scores.binary or b"", "<f4").tolist() == pytest.approx([0.83, 0.125, 0.5, 0.25])
