"""The Open Inference Protocol without a network: requests, answers, refusals."""

import base64
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.outputs import EmbeddingRequest
from service.errors import MalformedRequest
from service.extensions.inference_protocol.tensors import InputTensor, OutputTensor
from tests.extensions.inference_protocol.requests import INFER, encoded, infer, outputs, post
from tests.service.fakes import (
    CLASSES,
    SIZE,
    answer,
    expected_embedding,
    expected_indices,
    on_a_loop,
    pixels,
    png,
)
from tests.service.web.apps import App, app


@on_a_loop
@pytest.mark.parametrize("path", [INFER, "/v2/models/fake/versions/1/infer"])
async def test_pictures_get_their_rows_in_order(path: str) -> None:
    response = await infer(app(), encoded(3, 250, 3), path=path, id="mine", parameters={"top_k": 2})
    assert response.status == 200
    assert response.headers["content-type"] == "application/json"
    document = response.json
    assert (document["model_name"], document["model_version"], document["id"]) == (
        "fake",
        "1",
        "mine",
    )
    found = outputs(document)
    assert list(found) == ["label", "index", "score"]
    assert found["index"].tolist() == [expected_indices(red, 2) for red in (3, 250, 3)]
    assert found["label"].tolist() == [
        [f"label {i}" for i in row] for row in found["index"].tolist()
    ]
    np.testing.assert_array_equal(found["score"].astype(np.float32), [answer(3, 2)[0]] * 3)
    assert [each["datatype"] for each in document["outputs"]] == ["BYTES", "INT64", "FP32"]


@on_a_loop
async def test_pixels_of_right_size_stay_unchanged() -> None:
    data = np.stack([pixels(1), pixels(2)])
    tensor = {
        "name": "pixels",
        "datatype": "UINT8",
        "shape": list(data.shape),
        "data": data.tolist(),
    }
    response = await infer(app(), tensor, outputs=[{"name": "index"}])
    assert outputs(response.json)["index"].tolist() == [expected_indices(red, 5) for red in (1, 2)]


@on_a_loop
@pytest.mark.parametrize(
    ("bytes_allowed", "status"), [(0, 200), (-1, 413)], ids=["as many", "one more"]
)
async def test_each_picture_has_the_upload_limit(bytes_allowed: int, status: int) -> None:
    picture = encoded(3)
    size = len(png(3)) + bytes_allowed
    response = await infer(app(max_upload_bytes=size), picture)
    assert response.status == status
    if status == 413:
        assert response.json == {
            "error": f"{size + 1} bytes: at most {size} are allowed (VIT_MAX_UPLOAD_BYTES)"
        }


@on_a_loop
async def test_empty_header_means_one_picture() -> None:
    response = await post(app(), png(4), **{"inference-header-content-length": "0"})
    length = int(response.headers["inference-header-content-length"])
    document = json.loads(response.content[:length])
    assert [each["shape"] for each in document["outputs"]] == [[1, 5]] * 3
    assert np.frombuffer(response.content[-20:], "<f4")[0] == 0.5


@on_a_loop
async def test_classification_joins_three_outputs() -> None:
    wanted = [{"name": "score", "parameters": {"classification": 2}}, {"name": "index"}]
    response = await infer(app(), encoded(8), outputs=wanted, parameters={"top_k": 2})
    found = outputs(response.json)
    assert found["score"].tolist() == [["0.500000:8:label 8", "0.250000:9:label 9"]]
    assert found["index"].tolist() == [[8, 9]]


@on_a_loop
@pytest.mark.parametrize(("top_k", "classification"), [(3, 1), (1, 3)])
async def test_two_numbers_of_classes_are_refused(top_k: int, classification: int) -> None:
    wanted = [{"name": "score", "parameters": {"classification": classification}}]
    response = await infer(app(), encoded(8), outputs=wanted, parameters={"top_k": top_k})
    assert response.status == 400
    assert response.json["error"] == (
        f"top_k {top_k} and classification {classification} differ: send one of them"
    )


@on_a_loop
@pytest.mark.parametrize(
    ("parameters", "beside"),
    [
        ({"attention": "cls"}, {}),
        ({"attention": "relevance"}, {"evidence": [[0.25], [0.25]]}),
        ({}, {"evidence": [[0.25], [0.25]]}),
    ],
)
async def test_attention_is_one_map_a_picture(
    parameters: dict[str, str], beside: dict[str, Any]
) -> None:
    wanted = [{"name": name} for name in ("attention", *beside)]
    response = await infer(app(), encoded(1, 2), outputs=wanted, parameters=parameters)
    found = outputs(response.json)
    assert found.pop("attention").shape == (2, 2, 2)
    assert {name: values.tolist() for name, values in found.items()} == beside


@on_a_loop
@pytest.mark.parametrize(
    ("parameters", "embedding"),
    [({}, EmbeddingRequest()), ({"pool": "cls", "normalize": True}, EmbeddingRequest("cls", True))],
)
async def test_embeddings_come_beside_labels(
    parameters: dict[str, Any], embedding: EmbeddingRequest
) -> None:
    wanted = [{"name": "embedding"}, {"name": "index"}]
    response = await infer(app(), encoded(1, 2), outputs=wanted, parameters=parameters)
    found = outputs(response.json)
    np.testing.assert_array_equal(
        found["embedding"], np.stack([expected_embedding(red, embedding) for red in (1, 2)])
    )
    assert found["index"].tolist() == [expected_indices(red, 5) for red in (1, 2)]


@on_a_loop
async def test_documents_describe_the_model(service: App) -> None:
    server = (await service.get("/v2")).json
    assert server["name"] == "vitserve"
    assert "binary_tensor_data" in server["extensions"]
    for path in ("/v2/models/fake", "/v2/models/fake/versions/1"):
        document = (await service.get(path)).json
        assert document["versions"] == ["1"]
        assert [(each["name"], each["shape"]) for each in document["inputs"]] == [
            ("image", [-1]),
            ("pixels", [-1, SIZE, SIZE, 3]),
        ]
    configuration = (await service.get("/v2/models/fake/config")).json
    names = {each["name"] for each in configuration["output"]}
    assert names == {"label", "index", "score", "logits", "attention", "evidence", "embedding"}
    await infer(service, encoded(1, 2))
    for path in ("/v2/models/fake/stats", "/v2/models/stats"):
        [statistics] = (await service.get(path)).json["model_stats"]
        assert statistics["inference_count"] == 2
        assert statistics["inference_stats"]["success"]["count"] == 1
        assert statistics["inference_stats"]["queue"]["count"] == 2
        assert statistics["inference_stats"]["success"]["ns"] > 0


@on_a_loop
async def test_health_follows_the_engine(service: App) -> None:
    for state, stopping, status in (
        ("ready", False, 200),
        ("failed", False, 503),
        ("ready", True, 503),
    ):
        service.engine.state = state
        service.lifecycle.stopping = stopping
        for path in ("/v2/health/ready", "/v2/models/fake/ready"):
            assert (await service.get(path)).status == status
    assert (await service.get("/v2/health/live")).status == 200


IMAGE = encoded(1)
PIXELS = {"name": "pixels", "datatype": "UINT8", "shape": [1, SIZE, SIZE, 3]}
EMBEDDING = [{"name": "embedding"}]


@on_a_loop
async def test_nested_rows_of_files_are_read() -> None:
    nested = {**IMAGE, "shape": [1, 1], "data": [IMAGE["data"]]}
    assert (await infer(app(), nested)).status == 200


@on_a_loop
@pytest.mark.parametrize("padding", [0, 20_000])
async def test_a_repeated_name_is_refused(padding: int) -> None:
    tensor = json.dumps(encoded(7))
    space = " " * padding
    documents = [
        f'{{"inputs": [{tensor}], "inputs": {space}[]}}',
        f'{{"inputs": [{tensor[:-1]}, "shape": {space}[1]}}]}}',
        f'{{"inputs": [{tensor}], "parameters": {{"top_k": 1, "top_k": {space}2}}}}',
        f'{{"inputs": [{tensor}], "outputs": [{{"name": "label", "name": {space}"index"}}]}}',
    ]
    for document in documents:
        answer = await post(app(), document.encode())
        assert answer.status == 400
        assert "twice" in answer.json["error"]
    objects = json.dumps({"inputs": [encoded(7) | {"data": [{"b64": "AAAA"}]}]})
    answer = await post(app(), objects.encode() + space.encode())
    assert "element 0 is not a string" in answer.json["error"]
    text = json.dumps({"id": ":5", "inputs": [encoded(7)], "parameters": {"top_k": 1}})
    assert (await post(app(), text.encode() + space.encode())).status == 200


@on_a_loop
@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        ({}, 400, "inputs"),
        ({"inputs": []}, 422, "0 inputs"),
        ({"inputs": [IMAGE, PIXELS]}, 422, "expected one, "),
        ({"inputs": [{**IMAGE, "name": "x"}]}, 422, "'x'"),
        ({"inputs": [{**IMAGE, "datatype": "FP32"}]}, 422, "BYTES"),
        ({"inputs": [{**IMAGE, "shape": [2]}]}, 400, "1 elements"),
        ({"inputs": [{**IMAGE, "shape": [-1]}]}, 422, "first side is the number of pictures"),
        ({"inputs": [{**IMAGE, "shape": []}]}, 422, "shape [N]"),
        ({"inputs": [{**IMAGE, "shape": [0], "data": []}]}, 422, "no picture: send one or more"),
        ({"inputs": [{**IMAGE, "data": ["*"]}]}, 400, "element 0 is not base64"),
        ({"inputs": [{**IMAGE, "data": [["*"]]}]}, 400, "element 0 is not base64"),
        ({"inputs": [{**IMAGE, "data": [["*"], "*"]}]}, 400, "not evenly nested"),
        (
            {"inputs": [{**IMAGE, "data": ["/9j/ vvu" + " vvu" * 20]}]},
            400,
            "element 0 is base64 with spaces: its '+' was decoded",
        ),
        (
            {"inputs": [{**IMAGE, "data": [base64.b64encode(b"hello there").decode()]}]},
            415,
            "this is text, not a picture: send its bytes: in JSON as base64, else raw",
        ),
        ({"inputs": [{**IMAGE, "data": [7]}]}, 400, "element 0"),
        ({"inputs": [{**PIXELS, "datatype": "FP32", "data": [0.0]}]}, 422, ", not FP32 of ["),
        ({"inputs": [{**IMAGE, "data": None}]}, 422, "no data"),
        (
            {"inputs": [{**IMAGE, "parameters": {"binary_data_size": 5}}]},
            400,
            "0 are left|0 bytes are left",
        ),
        ({"inputs": [{**IMAGE, "parameters": {"binary_data_size": "5"}}]}, 400, "bytes are left"),
        ({"inputs": [{**PIXELS, "data": [[[[0] * 3] * SIZE] * (SIZE - 1)]}]}, 400, "elements"),
        ({"inputs": [{**PIXELS, "data": [[[[256] * 3] * SIZE] * SIZE]}]}, 400, "0 to 255"),
        ({"inputs": [{**PIXELS, "data": [[[["a"] * 3] * SIZE] * SIZE]}]}, 400, "0 to 255"),
        ({"inputs": [{**PIXELS, "data": [[1], [1, 2]]}]}, 400, "3 elements"),
        ({"inputs": [{**PIXELS, "shape": [1, SIZE, SIZE, 4], "data": []}]}, 422, "pixels"),
        ({"inputs": [IMAGE], "outputs": [{"name": "logit"}]}, 422, "'logit'"),
        (
            {
                "inputs": [IMAGE],
                "outputs": [{"name": "index", "parameters": {"classification": 1}}],
            },
            422,
            "score",
        ),
        ({"inputs": [IMAGE], "parameters": {"top_k": CLASSES + 1}}, 422, "1 to 10"),
        ({"inputs": [IMAGE], "parameters": {"top_k": True}}, 422, "top_k"),
        (
            {
                "inputs": [IMAGE],
                "parameters": {"attention": "lime"},
                "outputs": [{"name": "attention"}],
            },
            422,
            "lime",
        ),
        (
            {
                "inputs": [IMAGE],
                "parameters": {"attention": ["cls"]},
                "outputs": [{"name": "attention"}],
            },
            422,
            "cls",
        ),
        (
            {"inputs": [IMAGE], "outputs": [{"name": "label"}, {"name": "label"}]},
            422,
            "select it once",
        ),
        (
            {"inputs": [IMAGE], "outputs": EMBEDDING, "parameters": {"pool": "max"}},
            422,
            "pool 'max'",
        ),
        ({"inputs": [IMAGE], "outputs": EMBEDDING, "parameters": {"pool": 1}}, 422, "pool 1"),
        (
            {"inputs": [IMAGE], "outputs": EMBEDDING, "parameters": {"normalize": "yes"}},
            422,
            "normalize",
        ),
        (
            {"inputs": [{**IMAGE, "shape": [2], "data": [*IMAGE["data"], "R0lGODlhIG4="]}]},
            422,
            "picture 1: ",
        ),
        ({"inputs": [{**IMAGE, "shape": [10**18, 1]}]}, 413, "at most 64"),
        ({"inputs": [encoded(*range(65))]}, 413, "64"),
        ({"inputs": [IMAGE], "id": "x" * 1025}, 422, "1025 characters"),
        ({"input": [IMAGE]}, 400, "unknown field 'input'; available: inputs, "),
        ({"inputs": [IMAGE], "top_k": 1}, 400, "unknown field 'top_k'; available: "),
        (
            {"inputs": [{**IMAGE, "dtype": "BYTES"}]},
            400,
            "inputs[0]: unknown field 'dtype'; available: datatype, ",
        ),
        (
            {"inputs": [IMAGE], "outputs": [{"name": "score", "top_k": 1}]},
            400,
            "unknown field 'top_k'; available: ",
        ),
        (
            {"inputs": [IMAGE], "parameters": {"topk": 1}},
            422,
            "unknown parameter 'topk'; available: top_k, ",
        ),
        (
            {"inputs": [{**IMAGE, "parameters": {"shared_memory_region": "x"}}]},
            422,
            "input 'image': unknown parameter 'shared_memory_region'",
        ),
        (
            {"inputs": [IMAGE], "outputs": [{"name": "score", "parameters": {"clasification": 1}}]},
            422,
            "output 'score': unknown parameter 'clasification'; available: classification, ",
        ),
        (
            {"inputs": [IMAGE], "parameters": {"binary_data_output": "false"}},
            422,
            "expected true or false",
        ),
        ({"inputs": [IMAGE], "parameters": {"pool": "cls"}}, 422, "select the output embedding"),
        (
            {"inputs": [IMAGE], "parameters": {"attention": "cls"}},
            422,
            "select the output attention or evidence",
        ),
        (
            {"inputs": [IMAGE], "outputs": EMBEDDING, "parameters": {"top_k": 2}},
            422,
            "top_k: does not apply",
        ),
    ],
)
async def test_invalid_requests_get_protocol_error(
    request_: dict[str, Any], status: int, words: str, service: App
) -> None:
    response = await post(service, json.dumps(request_).encode())
    assert response.headers["content-type"] == "application/json"
    assert list(response.json) == ["error"]
    assert any(word in response.json["error"] for word in words.split("|")), response.json
    assert response.status == status
    assert service.metric("vit_admitted_images") == 0


@on_a_loop
@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"", {}),
        (b"{", {}),
        (b"[]", {}),
        (b"{}x", {"inference-header-content-length": "3"}),
        (b"{}", {"inference-header-content-length": "99"}),
        (b"{}", {"inference-header-content-length": "-1"}),
        (b"{}", {"inference-header-content-length": "two"}),
        (b"{}", {"inference-header-content-length": "9" * 5000}),
        (b'{"inputs":[],"id":"\xff"}', {}),
        (b'{"inputs":[],"parameters":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}", {}),
    ],
)
async def test_a_body_that_is_no_request_is_400(body: bytes, headers: dict[str, str]) -> None:
    response = await post(app(), body, **headers)
    assert (response.status, list(response.json)) == (400, ["error"])


@on_a_loop
@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        (png(1), "one picture alone, with the header Inference-Header-Content-Length: 0"),
        (b"--x\r\nContent-Disposition: form-data", "send JSON, not a form; or one picture alone"),
        (
            b'{"inputs":[{"parameters":{"binary_data_size":3}}]}abc',
            "binary tensors need the header Inference-Header-Content-Length",
        ),
    ],
    ids=["one picture", "form", "tensors"],
)
async def test_binary_without_its_header_names_it(body: bytes, remedy: str) -> None:
    response = await post(app(), body)
    assert response.status == 400
    assert remedy in response.json["error"]


@on_a_loop
@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/other/infer",
        "/v2/models/fake/versions/2/infer",
        "/v2/models/a/b/infer",
        "/v2/nothing",
    ],
)
async def test_another_model_is_404(path: str) -> None:
    response = await infer(app(), IMAGE, path=path)
    assert (response.status, list(response.json)) == (404, ["error"])


@on_a_loop
async def test_json_of_many_values_is_not_parsed() -> None:
    """A list takes twenty times the memory of its text, and the event loop reads it."""
    tensor = (
        b'{"inputs":[{"name":"image","datatype":"BYTES","shape":[1],"data":['
        + b"[]," * 500_000
        + b"0]}]}"
    )
    refused = await post(app(), tensor)
    assert (refused.status, list(refused.json)) == (413, ["error"])
    assert "binary" in refused.json["error"]
    # What follows the JSON does not count.
    data = struct.pack("<I", 600_000) + b"," * 600_000
    header = {
        "name": "image",
        "datatype": "BYTES",
        "shape": [1],
        "parameters": {"binary_data_size": len(data)},
    }
    document = json.dumps({"inputs": [header]}).encode()
    response = await post(
        app(), document + data, **{"inference-header-content-length": str(len(document))}
    )
    assert response.status == 415


@on_a_loop
@pytest.mark.parametrize("nested", [False, True])
async def test_strings_in_pixels_are_refused(
    nested: bool,
) -> None:
    data = ["a" * 1_000_000, *["a"] * 200_000]  # as an array 800 GB
    tensor = {
        "name": "pixels",
        "datatype": "UINT8",
        "shape": [1, 8, 8, 3],
        "data": [data] if nested else data,
    }
    response = await post(app(), json.dumps({"inputs": [tensor]}).encode())
    assert response.status == 400
    assert "0 to 255" in response.json["error"]


def raw(files: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(file)) + file for file in files)


def read(count: int, data: object) -> list[bytearray]:
    return InputTensor("image", "BYTES", [count], data).files()


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(0, 220), st.binary(max_size=6))
def test_raw_files_survive_a_round_trip(files: list[bytes], cut: int, more: bytes) -> None:
    assert read(len(files), memoryview(raw(files))) == files
    assert read(len(files), [base64.b64encode(file).decode() for file in files]) == files
    damaged = raw(files)[:cut] + more
    try:
        found = read(len(files), memoryview(damaged))
    except MalformedRequest:
        return
    assert raw([bytes(file) for file in found]) == damaged


@given(st.lists(st.text(max_size=9), min_size=1, max_size=5))
def test_raw_texts_survive_a_round_trip(texts: list[str]) -> None:
    sent = OutputTensor("label", np.array(texts, object), binary=True).raw()
    assert [file.decode() for file in read(len(texts), memoryview(sent))] == texts


def test_base64_of_other_writers_is_read() -> None:
    text = base64.b64encode(b"\xfb\xef\xff\xfe").decode()
    texts = [f"data:image/png;base64,{text}", text.translate({43: 45, 47: 95}), text.rstrip("=")]
    assert read(3, texts) == [b"\xfb\xef\xff\xfe"] * 3


def test_surplus_elements_are_not_collected() -> None:
    data = bytes(range(256)) * 4096
    assert read(1, [base64.b64encode(data).decode()]) == [data]
    for wrong in (
        "=" * 4 + "A" * (1 << 20),
        "A" * (1 << 20) + "*",
        "A" * ((1 << 20) - 1) + "=" + "A" * 4,
    ):
        with pytest.raises(MalformedRequest, match="element 0 is not base64"):
            read(1, [wrong])
    with pytest.raises(MalformedRequest, match="4 elements, and the shape is"):
        read(3, memoryview(bytes(4 * 2_000_000)))


@on_a_loop
@pytest.mark.parametrize(
    ("method", "path", "status", "remedy"),
    [
        ("POST", "/v2/models/fake/generate", 405, "did you mean POST /v2/models/fake/infer?"),
        ("POST", "/v2/models/fake", 405, "did you mean POST /v2/models/fake/infer?"),
        (
            "POST",
            "/v2/models/fake/versions/1/generate_stream",
            405,
            "did you mean POST /v2/models/fake/versions/1/infer?",
        ),
        ("GET", "/v2/models/fake/infer", 404, "a model has no GET /infer; below its path there "),
        ("PUT", "/v2/models/fake", 405, "did you mean PUT /models/fake?"),
        ("POST", "/v1/models/fake:predict", 404, " or POST /v2/models/fake/infer?"),
        ("GET", "/v2/trace/setting", 404, "; there are /v2, /v2/health/live, "),
    ],
)
async def test_absent_routes_name_the_existing_ones(
    method: str, path: str, status: int, remedy: str
) -> None:
    response = await app().request(method, path)
    assert response.status == status
    assert remedy in response.json["error" if path.startswith("/v2") else "detail"]
