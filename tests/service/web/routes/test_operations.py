"""The routes of operators and their tools."""

from __future__ import annotations

import pytest

from tests.service.fakes import CLASSES, SIZE, on_a_loop
from tests.service.web.apps import app


@on_a_loop
async def test_the_model_tells_what_is_served() -> None:
    document = (await app().get("/model")).json
    assert document["name"] == "fake"
    assert document["source"] == "nowhere"
    assert document["revision"] is None
    assert document["architecture"] == "fake_vit"
    assert document["parameters"] == 123
    assert document["input_size"] == [SIZE, SIZE]
    assert (document["patch_size"], document["grid"], document["classes"]) == (4, [2, 2], CLASSES)
    assert (document["device"], document["dtype"], document["compiled"]) == ("cpu", "float32", "off")
    assert (document["max_batch"], document["batch_sizes"]) == (4, None)
    assert document["preprocessing"]["mean"] == [0.5, 0.5, 0.5]
    assert document["attention_source"] == "cls"


@on_a_loop
async def test_labels_are_told_in_index_order() -> None:
    assert (await app().get("/labels")).json == {"model": "fake", "labels": [f"label {i}" for i in range(CLASSES)]}


@on_a_loop
@pytest.mark.parametrize(("state", "reason"), [("loading", "the model is loading"), ("failed", "the device failed")])
async def test_without_an_engine_only_readiness_suffers_and_work_is_503(state: str, reason: str) -> None:
    service = app()
    service.engine.state, service.engine.reason = state, reason
    assert (await service.get("/healthz")).status == 200
    assert (await service.get("/metrics")).status == 200
    assert (await service.get("/")).status == 200
    for exchange in (await service.get("/readyz"), await service.classify(), await service.get("/model")):
        assert (exchange.status, exchange.code) == (503, "engine_unavailable")
        assert exchange.json["detail"] == reason
        assert int(exchange.headers["retry-after"]) > 0
    assert service.metric("vit_engine_up", device="cpu") == 0
