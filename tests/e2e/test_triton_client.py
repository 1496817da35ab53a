"""NVIDIA's own client of the Open Inference Protocol against a real server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.web.inference_protocol import EXTENSIONS, REPOSITORY_EXTENSION
from tests.e2e.serving import CHECKPOINT_NAME, INFERRED, SIZE, Pictures, Serve, Served, check_inferred

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
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in INFERRED]
    parameters = {"top_k": 3, "attention": "cls"}
    answer = client.infer(CHECKPOINT_NAME, [images(*files)], outputs=wanted, request_id="17", parameters=parameters)
    assert answer.get_response()["id"] == "17"
    check_inferred(answer, server, files)


def test_the_checkpoint_is_loaded_again_with_the_admin_key_and_never_unloaded(client: Any) -> None:
    admin = {"Authorization": "Bearer admin"}
    client.load_model(CHECKPOINT_NAME, headers=admin)
    assert client.is_model_ready(CHECKPOINT_NAME)
    [model] = client.get_model_repository_index()
    assert (model["name"], model["state"]) == (CHECKPOINT_NAME, "READY")
    with pytest.raises(utils.InferenceServerException, match="the admin key is needed"):
        client.load_model(CHECKPOINT_NAME)
    with pytest.raises(utils.InferenceServerException, match="config: unknown name"):
        client.load_model(CHECKPOINT_NAME, headers=admin, config="{}")
    with pytest.raises(utils.InferenceServerException, match="is the default model"):
        client.unload_model(CHECKPOINT_NAME, headers=admin)
