"""Memory that pictures take while the protocol reads, holds and refuses them."""

import asyncio
import base64
import gc
import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.extensions.inference_protocol.grpc.caller import calling, raw
from tests.model.images.pictures import encode, noise
from tests.service.fakes import on_a_loop, until
from tests.service.web.apps import App, app, budget_of
from tests.service.web.memory import NO_PICTURE, little_stays


def infer(file: bytes) -> dict[str, Any]:
    data = struct.pack("<I", len(file)) + file
    tensor = {
        "name": "image",
        "datatype": "BYTES",
        "shape": [1],
        "parameters": {"binary_data_size": len(data)},
    }
    header = json.dumps({"inputs": [tensor]}).encode()
    headers = {"inference-header-content-length": str(len(header))}
    return {"path": "/v2/models/fake/infer", "headers": headers, "body": header + data}


@on_a_loop
async def test_http_frees_a_refused_picture() -> None:
    service = app()
    request = infer(NO_PICTURE)
    assert (await service.request("POST", **request)).status == 415  # objects that are made once
    async with little_stays():
        assert (await service.request("POST", **request)).status == 415


@on_a_loop
async def test_grpc_frees_a_refused_picture() -> None:
    data = struct.pack("<I", len(NO_PICTURE)) + NO_PICTURE
    message = raw("image", "BYTES", [1], data).SerializeToString()
    async with calling() as caller:
        await caller.refusal(message)
        async with little_stays():
            await caller.refusal(message)
            await until(lambda: caller.service.metric("vit_inflight_requests") == 0)


def picture() -> bytes:
    """Return a file of 3 MB."""
    return encode(noise(1000, 1000), "PNG")


def infer_json(file: bytes) -> dict[str, Any]:
    tensor = {
        "name": "image",
        "datatype": "BYTES",
        "shape": [1],
        "data": [base64.b64encode(file).decode()],
    }
    return {"path": "/v2/models/fake/infer", "body": json.dumps({"inputs": [tensor]}).encode()}


@contextmanager
def traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


async def hold_no_more_than_counted(service: App, count: int) -> None:
    """Check that requests at the engine hold only the counted memory, and a little more."""
    await until(lambda: service.engine.waiting == count)
    gc.collect()
    assert tracemalloc.get_traced_memory()[0] < budget_of(service).in_use + (1 << 20)


@on_a_loop
@pytest.mark.parametrize("request_of", [infer_json, infer])
async def test_memory_of_inference_is_counted(
    request_of: Callable[[bytes], dict[str, Any]],
) -> None:
    service = app()
    request = request_of(picture())
    assert (await service.request("POST", **request)).status == 200  # objects that are made once
    service.engine.gate.clear()
    with traced():
        held = [asyncio.create_task(service.request("POST", **request)) for _ in range(3)]
        await hold_no_more_than_counted(service, len(held))
    service.engine.gate.set()
    assert [(await each).status for each in held] == [200] * len(held)
    assert budget_of(service).in_use == 0
