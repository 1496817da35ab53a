"""NVIDIA's own client of the Open Inference Protocol against a real server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.web.inference_protocol import EXTENSIONS, REPOSITORY_EXTENSION
from tests.e2e.serving import CHECKPOINT_NAME, LABELS, SIZE, Pictures, Serve, Served

triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
utils = pytest.importorskip("tritonclient.utils")

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> Served:
    return serve_module(admin_key="admin")


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return triton.InferenceServerClient(server.url.removeprefix("http://"))


def images(*files: bytes, binary: bool = True) -> Any:
    tensor = triton.InferInput("image", [len(files)], "BYTES")
    tensor.set_data_from_numpy(np.array(files, object), binary_data=binary)
    return tensor


def test_it_sees_a_server_and_a_model_that_are_ready(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(CHECKPOINT_NAME)
    assert client.is_model_ready(CHECKPOINT_NAME, "1")
    assert not client.is_model_ready("another")
    assert tuple(client.get_server_metadata()["extensions"]) == (*EXTENSIONS, REPOSITORY_EXTENSION)
    metadata = client.get_model_metadata(CHECKPOINT_NAME)
    assert metadata["inputs"][1] == {"name": "pixels", "datatype": "UINT8", "shape": [-1, SIZE, SIZE, 3]}
    assert client.get_model_config(CHECKPOINT_NAME)["name"] == CHECKPOINT_NAME


@pytest.mark.parametrize("binary", [True, False])
def test_answers_are_those_of_classify(client: Any, server: Served, pictures: Pictures, binary: bool) -> None:
    files = pictures.files[:5]
    wanted = [
        triton.InferRequestedOutput(name, binary_data=binary)
        for name in ("label", "index", "score", "logits", "attention")
    ]
    parameters = {"top_k": 3, "attention": "cls"}
    answer = client.infer(CHECKPOINT_NAME, [images(*files)], outputs=wanted, request_id="17", parameters=parameters)
    assert answer.get_response()["id"] == "17"
    names = ("score", "index", "label", "logits", "attention")
    score, index, label, logits, maps = (answer.as_numpy(name) for name in names)
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.take_along_axis(scores, index, axis=1), score, rtol=1e-4)
    for position, file in enumerate(files):
        expected = server.classify(file, "top_k=3&attention=true").json()
        predictions = expected["predictions"]
        assert index[position].tolist() == [each["index"] for each in predictions]
        assert [text.decode() if binary else text for text in label[position]] == [
            each["label"] for each in predictions
        ]
        # A batch of another size sums in another order.
        np.testing.assert_allclose(score[position], [each["score"] for each in predictions], rtol=0.02)
        np.testing.assert_allclose(maps[position], expected["attention"]["values"], rtol=0.05, atol=1e-4)


def test_pixels_and_classification(client: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, SIZE, SIZE, 3), np.uint8)
    tensor = triton.InferInput("pixels", list(pixels.shape), "UINT8")
    tensor.set_data_from_numpy(pixels)
    answer = client.infer(
        CHECKPOINT_NAME, [tensor], outputs=[triton.InferRequestedOutput("score", class_count=len(LABELS))]
    )
    rows = answer.as_numpy("score")
    assert rows.shape == (4, len(LABELS))
    for row in rows.tolist():
        values, numbers, labels = zip(*(text.decode().split(":") for text in row), strict=True)
        assert sorted(map(float, values), reverse=True) == [float(value) for value in values]
        assert [LABELS[int(number)] for number in numbers] == list(labels)


def test_statistics_grow_with_requests(client: Any, pictures: Pictures) -> None:
    def count() -> int:
        [statistics] = client.get_inference_statistics(CHECKPOINT_NAME)["model_stats"]
        return int(statistics["inference_count"])

    before = count()
    client.infer(CHECKPOINT_NAME, [images(*pictures.files[:3])])
    assert count() == before + 3


def test_errors_are_told_with_the_position_of_the_picture(client: Any, pictures: Pictures) -> None:
    with pytest.raises(utils.InferenceServerException, match=r"picture 1: not a picture"):
        client.infer(CHECKPOINT_NAME, [images(pictures.files[0], b"nothing")])
    with pytest.raises(utils.InferenceServerException, match="'another': no such model"):
        client.infer("another", [images(pictures.files[0])])


def test_the_checkpoint_is_loaded_again_with_the_admin_key_and_never_unloaded(client: Any) -> None:
    admin = {"Authorization": "Bearer admin"}
    client.load_model(CHECKPOINT_NAME, headers=admin)
    assert client.is_model_ready(CHECKPOINT_NAME)
    [model] = client.get_model_repository_index()
    assert (model["name"], model["state"]) == (CHECKPOINT_NAME, "READY")
    with pytest.raises(utils.InferenceServerException, match="the admin key is needed"):
        client.load_model(CHECKPOINT_NAME)
    with pytest.raises(utils.InferenceServerException, match="'config'"):
        client.load_model(CHECKPOINT_NAME, headers=admin, config="{}")
    with pytest.raises(utils.InferenceServerException, match="never unloaded"):
        client.unload_model(CHECKPOINT_NAME, headers=admin)
