"""What a request sent is held no more than once, and given back at once, not when the garbage collector comes by."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import struct
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from tests.model.images.pictures import encode, noise
from tests.service.fakes import on_a_loop, until
from tests.service.web.apps import App, app, budget_of, form
from tests.service.web.grpc.caller import calling, raw

NO_PICTURE = bytes(5 << 20)


@asynccontextmanager
async def little_stays() -> AsyncIterator[None]:
    """Without the collector, less than a fifth of a picture is held in the end.

    A thread's last references may outlive the answer that it gave by a moment, so this waits for the end.
    """
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        await until(lambda: tracemalloc.get_traced_memory()[0] - before < len(NO_PICTURE) // 5)
    finally:
        tracemalloc.stop()
        gc.enable()


def classify() -> dict[str, Any]:
    return {"path": "/classify", "headers": {"content-type": "image/png"}, "body": NO_PICTURE}


def classify_batch() -> dict[str, Any]:
    return {"path": "/classify/batch", **form(NO_PICTURE, b"x")}


def infer(file: bytes = NO_PICTURE) -> dict[str, Any]:
    data = struct.pack("<I", len(file)) + file
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(data)}}
    header = json.dumps({"inputs": [tensor]}).encode()
    headers = {"inference-header-content-length": str(len(header))}
    return {"path": "/v2/models/fake/infer", "headers": headers, "body": header + data}


@on_a_loop
@pytest.mark.parametrize(("make", "status"), [(classify, 415), (classify_batch, 200), (infer, 415)])
async def test_over_http(make: Callable[[], dict[str, Any]], status: int) -> None:
    service, request = app(), make()
    assert (await service.request("POST", **request)).status == status  # whatever is made once
    async with little_stays():
        assert (await service.request("POST", **request)).status == status


@on_a_loop
async def test_over_grpc() -> None:
    data = struct.pack("<I", len(NO_PICTURE)) + NO_PICTURE
    message = raw("image", "BYTES", [1], data).SerializeToString()
    async with calling() as caller:
        await caller.refusal(message)
        async with little_stays():
            await caller.refusal(message)
            await until(lambda: caller.service.metric("vit_inflight_requests") == 0)


def picture() -> bytes:
    """A file of 3 MB."""
    return encode(noise(1000, 1000), "PNG")


def infer_json(file: bytes) -> dict[str, Any]:
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(file).decode()]}
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
    """At the engine, requests hold the memory that is counted for them, and a little for what they are."""
    await until(lambda: service.engine.waiting == count)
    gc.collect()
    assert tracemalloc.get_traced_memory()[0] < budget_of(service).in_use + (1 << 20)


@on_a_loop
@pytest.mark.parametrize("request_of", [infer_json, infer])
async def test_what_inference_over_http_holds_is_counted(request_of: Callable[[bytes], dict[str, Any]]) -> None:
    service, request = app(), request_of(picture())
    assert (await service.request("POST", **request)).status == 200  # whatever is made once
    service.engine.gate.clear()
    with traced():
        held = [asyncio.create_task(service.request("POST", **request)) for _ in range(3)]
        await hold_no_more_than_counted(service, len(held))
    service.engine.gate.set()
    assert [(await each).status for each in held] == [200] * len(held)
    assert budget_of(service).in_use == 0
