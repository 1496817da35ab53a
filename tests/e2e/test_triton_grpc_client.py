"""NVIDIA's own client of the Open Inference Protocol over gRPC, against a real server of two workers."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.web.inference_protocol import EXTENSIONS
from tests.e2e.serving import CHECKPOINT_NAME, INFERRED, SIZE, Pictures, Serve, Served, check_inferred

triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
http = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
utils = pytest.importorskip("tritonclient.utils")

pytestmark = pytest.mark.timeout(120)

WORKERS = 2
LISTENING = "0A"
"""A state of sockets, as the kernel writes it."""


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> Served:
    return serve_module(workers=WORKERS, grpc_port=0)


def address(server: Served) -> str:
    found = re.search(r"gRPC: (\S+)", server.log)
    assert found, server.log
    return found[1]


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return triton.InferenceServerClient(address(server))


def images(*files: bytes) -> Any:
    tensor = triton.InferInput("image", [len(files)], "BYTES")
    tensor.set_data_from_numpy(np.array(files, object))
    return tensor


def test_every_worker_listens_on_the_one_port(server: Served) -> None:
    port = int(address(server).rpartition(":")[2])
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    assert sum(fields[1].endswith(f":{port:04X}") and fields[3] == LISTENING for fields in lines) == WORKERS


def test_a_service_for_other_machines_answers_from_outside_of_loopback(serve_module: Serve, pictures: Pictures) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: the system names the address that it would send from
        except OSError:
            pytest.skip("this machine has no address but loopback")
        own = probe.getsockname()[0]
    outside = serve_module(host=own, grpc_port=0)
    assert address(outside).startswith(f"{own}:")
    client = triton.InferenceServerClient(address(outside))
    assert client.is_server_ready()
    answer = client.infer(CHECKPOINT_NAME, [images(pictures.files[0])])
    assert answer.as_numpy("label").shape == (1, 5)


def test_it_sees_a_server_and_a_model_that_are_ready(client: Any, server: Served) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(CHECKPOINT_NAME)
    assert client.is_model_ready(CHECKPOINT_NAME, "1")
    assert not client.is_model_ready("another")
    assert tuple(client.get_server_metadata().extensions) == EXTENSIONS
    over_http = http.InferenceServerClient(server.url.removeprefix("http://"))
    described = client.get_model_metadata(CHECKPOINT_NAME, as_json=True)
    assert [each["name"] for each in described["outputs"]] == [
        each["name"] for each in over_http.get_model_metadata(CHECKPOINT_NAME)["outputs"]
    ]
    config = client.get_model_config(CHECKPOINT_NAME).config
    assert (config.name, config.input[1].dims) == (CHECKPOINT_NAME, [-1, SIZE, SIZE, 3])
    assert config.input[0].data_type == triton.model_config_pb2.TYPE_STRING


def test_answers_are_those_of_classify(client: Any, server: Served, pictures: Pictures) -> None:
    files = pictures.files[:5]
    wanted = [triton.InferRequestedOutput(name) for name in INFERRED]
    parameters = {"top_k": 3, "attention": "cls"}
    answer = client.infer(CHECKPOINT_NAME, [images(*files)], outputs=wanted, request_id="17", parameters=parameters)
    assert answer.get_response().id == "17"
    check_inferred(answer, server, files)
