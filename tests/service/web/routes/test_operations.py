"""The routes of operators and their tools."""

from __future__ import annotations

import pytest

from tests.service.fakes import CLASSES, on_a_loop
from tests.service.web.apps import App, app


@on_a_loop
async def test_the_model_is_described_by_exactly_these_names_and_values(service: App) -> None:
    assert (await service.get("/model")).json == {
        "name": "fake",
        "source": "nowhere",
        "revision": None,
        "content": "0123456789abcdef",
        "loaded_at": "2026-01-01T00:00:00Z",
        "format": "fake",
        "architecture": "fake_vit",
        "parameters": 123,
        "input_size": [8, 8],
        "channels": 3,
        "patch_size": 4,
        "grid": [2, 2],
        "layers": 3,
        "heads": 2,
        "width": 8,
        "classes": 10,
        "pool": "cls",
        "runtime": "vitserve",
        "runtime_version": None,
        "temperature": 1.0,
        "score_form": {"power": 1.0, "crowding": 0.0},
        "multi_label": False,
        "device": "cpu",
        "dtype": "float32",
        "backend": "fake 1.0",
        "compiled": "off",
        "max_batch": 4,
        "batch_sizes": None,
        "preprocessing": {
            "size": [8, 8],
            "resize": "squash",
            "resize_size": [8, 8],
            "interpolation": "nearest",
            "crop_rounding": "half_even",
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
        },
        "attention_source": "cls",
        "attention_methods": ["relevance", "cls", "rollout", "gae"],
        "templates": None,
        "assumed": [],
        "coverage": None,
        "calibrated_on": None,
    }


@on_a_loop
async def test_labels_are_told_in_index_order() -> None:
    assert (await app().get("/labels")).json == {"model": "fake", "labels": [f"label {i}" for i in range(CLASSES)]}


@on_a_loop
@pytest.mark.parametrize(("state", "reason"), [("loading", "the model is loading"), ("failed", "the device failed")])
async def test_without_an_engine_only_readiness_suffers_and_work_is_503(service: App, state: str, reason: str) -> None:
    service.engine.state, service.engine.reason = state, reason
    assert (await service.get("/healthz")).status == 200
    assert (await service.get("/metrics")).status == 200
    assert (await service.get("/")).status == 200
    for response in (await service.get("/readyz"), await service.classify(), await service.get("/model")):
        assert (response.status, response.code) == (503, "engine_unavailable")
        assert response.json["detail"] == reason
        assert int(response.headers["retry-after"]) > 0
    assert service.metric("vit_engine_up", device="cpu") == 0


@on_a_loop
async def test_who_is_about_to_stop_is_alive_and_not_ready(service: App) -> None:
    assert (await service.get("/readyz")).json == {"status": "ready"}
    service.lifecycle.stopping = True
    assert (await service.get("/healthz")).json == {"status": "ok"}
    for path in ("/readyz", "/ping", "/v2/health/ready", "/v2/models/fake/ready"):
        assert (await service.get(path)).status == 503
    response = await service.classify()  # load balancers need time to look away
    assert (response.status, response.headers["connection"]) == (200, "close")
    service.lifecycle.draining = True
    assert (await service.classify()).code == (await service.get("/readyz")).code == "draining"
    assert (service.lifecycle.answered, service.lifecycle.refused) == (1, 2)  # the model's readiness is one of them
