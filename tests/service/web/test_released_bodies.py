"""What a refused request sent is given back at once, and not only when the garbage collector comes by."""

from __future__ import annotations

import gc
import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.service.fakes import on_a_loop
from tests.service.web.apps import app, form, settle, until
from tests.service.web.grpc.caller import calling, raw

NO_PICTURE = bytes(5 << 20)


@contextmanager
def little_stays() -> Iterator[None]:
    """Without the collector, less than a fifth of a picture is held at the end."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        assert tracemalloc.get_traced_memory()[0] - before < len(NO_PICTURE) // 5
    finally:
        tracemalloc.stop()
        gc.enable()


def classify() -> dict[str, Any]:
    return {"path": "/classify", "headers": {"content-type": "image/png"}, "body": NO_PICTURE}


def classify_batch() -> dict[str, Any]:
    return {"path": "/classify/batch", **form(NO_PICTURE, b"x")}


def infer() -> dict[str, Any]:
    data = struct.pack("<I", len(NO_PICTURE)) + NO_PICTURE
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(data)}}
    header = json.dumps({"inputs": [tensor]}).encode()
    headers = {"inference-header-content-length": str(len(header))}
    return {"path": "/v2/models/fake/infer", "headers": headers, "body": header + data}


@on_a_loop
@pytest.mark.parametrize(("make", "status"), [(classify, 415), (classify_batch, 200), (infer, 415)])
async def test_over_http(make: Callable[[], dict[str, Any]], status: int) -> None:
    service, request = app(), make()
    assert (await service.request("POST", **request)).status == status  # whatever is made once
    with little_stays():
        assert (await service.request("POST", **request)).status == status
        await settle()


@on_a_loop
async def test_over_grpc() -> None:
    data = struct.pack("<I", len(NO_PICTURE)) + NO_PICTURE
    message = raw("image", "BYTES", [1], data).SerializeToString()
    async with calling() as caller:
        await caller.refusal(message)
        with little_stays():
            await caller.refusal(message)
            await until(lambda: caller.service.metric("vit_inflight_requests") == 0)
            await settle()
