"""NVIDIA's clients of the Open Inference Protocol over HTTP and gRPC, against two workers."""

import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.extensions.inference_protocol import EXTENSIONS, REPOSITORY_EXTENSION
from tests.e2e.serving import (
    CHECKPOINT_NAME,
    INFERRED,
    SIZE,
    Pictures,
    Serve,
    Served,
    check_inferred,
)

by_http = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
by_grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
utils = pytest.importorskip("tritonclient.utils")

pytestmark = pytest.mark.timeout(120)

WORKERS = 2
LISTENING = "0A"
"""The kernel's number for a state of sockets."""


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> Served:
    return serve_module(workers=WORKERS, grpc_port=0, admin_key="admin")


def grpc_address(server: Served) -> str:
    found = re.search(r"gRPC: (\S+)", server.log)
    assert found, server.log
    return found[1]


@pytest.fixture(scope="module")
def http(server: Served) -> Any:
    return by_http.InferenceServerClient(server.url.removeprefix("http://"))


@pytest.fixture(scope="module")
def grpc(server: Served) -> Any:
    return by_grpc.InferenceServerClient(grpc_address(server))


def images(triton: Any, *files: bytes) -> Any:
    tensor = triton.InferInput("image", [len(files)], "BYTES")
    tensor.set_data_from_numpy(np.array(files, object))
    return tensor


def test_every_worker_serves_one_grpc_port(server: Served) -> None:
    port = int(grpc_address(server).rpartition(":")[2])
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()
    ]
    assert (
        sum(fields[1].endswith(f":{port:04X}") and fields[3] == LISTENING for fields in lines)
        == WORKERS
    )


def test_other_machines_reach_grpc(serve_module: Serve, pictures: Pictures) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(
                ("192.0.2.1", 9)
            )  # sends no packet: the system names the address that it would use
        except OSError:
            pytest.skip("this machine has no address but loopback")
        own = probe.getsockname()[0]
    outside = serve_module(host=own, grpc_port=0)
    assert grpc_address(outside).startswith(f"{own}:")
    client = by_grpc.InferenceServerClient(grpc_address(outside))
    assert client.is_server_ready()
    answer = client.infer(CHECKPOINT_NAME, [images(by_grpc, pictures.files[0])])
    assert answer.as_numpy("label").shape == (1, 5)


def test_clients_see_a_ready_model(http: Any, grpc: Any) -> None:
    for client in (http, grpc):
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(CHECKPOINT_NAME)
        assert client.is_model_ready(CHECKPOINT_NAME, "1")
        assert not client.is_model_ready("another")
    assert tuple(http.get_server_metadata()["extensions"]) == (*EXTENSIONS, REPOSITORY_EXTENSION)
    assert tuple(grpc.get_server_metadata().extensions) == EXTENSIONS
    metadata = http.get_model_metadata(CHECKPOINT_NAME)
    assert metadata["inputs"][1] == {
        "name": "pixels",
        "datatype": "UINT8",
        "shape": [-1, SIZE, SIZE, 3],
    }
    outputs = grpc.get_model_metadata(CHECKPOINT_NAME, as_json=True)["outputs"]
    assert [each["name"] for each in outputs] == [each["name"] for each in metadata["outputs"]]
    assert http.get_model_config(CHECKPOINT_NAME)["name"] == CHECKPOINT_NAME
    config = grpc.get_model_config(CHECKPOINT_NAME).config
    assert (config.name, config.input[1].dims) == (CHECKPOINT_NAME, [-1, SIZE, SIZE, 3])
    assert config.input[0].data_type == by_grpc.model_config_pb2.TYPE_STRING


@pytest.mark.parametrize(
    ("protocol", "options"),
    [("http", {"binary_data": True}), ("http", {"binary_data": False}), ("grpc", {})],
    ids=["http, binary", "http, JSON", "grpc"],
)
def test_answers_are_those_of_classify(
    protocol: str,
    options: dict[str, bool],
    request: pytest.FixtureRequest,
    server: Served,
    pictures: Pictures,
) -> None:
    client = request.getfixturevalue(protocol)
    triton = {"http": by_http, "grpc": by_grpc}[protocol]
    files = pictures.files[:5]
    wanted = [triton.InferRequestedOutput(name, **options) for name in INFERRED]
    parameters = {"top_k": 3, "attention": "cls"}
    sent = [images(triton, *files)]
    answer = client.infer(
        CHECKPOINT_NAME, sent, outputs=wanted, request_id="17", parameters=parameters
    )
    response = answer.get_response()
    assert (response["id"] if protocol == "http" else response.id) == "17"
    check_inferred(answer, server, files)


def test_the_admin_key_reloads_a_checkpoint(http: Any) -> None:
    admin = {"Authorization": "Bearer admin"}
    http.load_model(CHECKPOINT_NAME, headers=admin)
    assert http.is_model_ready(CHECKPOINT_NAME)
    [model] = http.get_model_repository_index()
    assert (model["name"], model["state"]) == (CHECKPOINT_NAME, "READY")
    with pytest.raises(utils.InferenceServerException, match="the admin key is needed"):
        http.load_model(CHECKPOINT_NAME)
    with pytest.raises(utils.InferenceServerException, match="config: unknown name"):
        http.load_model(CHECKPOINT_NAME, headers=admin, config="{}")
    with pytest.raises(utils.InferenceServerException, match="is the default model"):
        http.unload_model(CHECKPOINT_NAME, headers=admin)
