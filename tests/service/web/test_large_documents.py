"""Documents of very many values are read and written on a thread, with the same result."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from service.web import request as request_module
from service.web.inference_protocol import inference
from service.web.routes import classify, inference_protocol
from tests.service.fakes import CLASSES, on_a_loop, png
from tests.service.web.apps import App, form

BIG = "documents_0"
LOOP = threading.main_thread().name


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the threads on which documents are read and written."""
    found: set[str] = set()

    def watch(module: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(module, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            found.add(threading.current_thread().name)
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, watched)

    watch(classify, "_fields")
    watch(inference_protocol, "decode_request")
    watch(inference_protocol, "encode_answer")
    watch(inference, "make_outputs")
    return found


@on_a_loop
@pytest.mark.parametrize(("large", "thread"), [(1, BIG), (10_000, LOOP)])
async def test_json_of_many_values_does_not_hold_the_event_loop(
    large: int, thread: str, threads: set[str], monkeypatch: pytest.MonkeyPatch, service: App
) -> None:
    monkeypatch.setattr(request_module, "LARGE", large)
    monkeypatch.setattr(inference, "BYTES_A_VALUE", 100)
    single = await service.classify(png(7), query=f"top_k={CLASSES}")
    assert [one["index"] for one in single.json["predictions"]][:1] == [7]
    batch = await service.request("POST", "/classify/batch", **form(png(1), b"text", png(2)))
    codes = [one.get("error", {}).get("code") for one in batch.json["results"]]
    assert codes == [None, "unsupported_media_type", None]
    image = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(png(3)).decode()]}
    body = json.dumps({"inputs": [image]}).encode()
    answer = await service.request("POST", "/v2/models/fake/infer", body=body)
    assert answer.json["outputs"][1]["data"][0] == 3
    assert threads == {thread}
