"""What all routes have in common: draining, measures, defects, start and stop."""

from __future__ import annotations

import asyncio
import logging

import pytest

from service.observe.metrics import Metrics
from service.settings import load_settings
from service.web import app as app_module
from service.web import middleware
from service.web.problems import CODES
from tests.service.fakes import SIZE, on_a_loop, png, until
from tests.service.web.apps import App, Clock, app, form, kept, service_in, settle


@on_a_loop
async def test_while_draining_new_work_is_refused_and_every_answer_closes_its_connection(service: App) -> None:
    image_id = await kept(service)
    assert (await service.get("/readyz")).status == 200
    service.lifecycle.draining = True
    for response in (
        await service.classify(),
        await service.request("POST", "/classify/batch", **form(png(1))),
        await service.get("/attention", f"id={image_id}"),
        await service.get("/readyz"),
    ):
        assert (response.status, response.code) == (503, "draining")
        assert response.headers["connection"] == "close"
        assert "retry-after" in response.headers
    for path in ("/healthz", "/metrics", "/model"):
        response = await service.get(path)
        assert (response.status, response.headers["connection"]) == (200, "close")


@on_a_loop
@pytest.mark.parametrize("hold_seconds", [0.0, 3600.0])
async def test_a_refusal_for_want_of_an_engine_is_held_back_but_probes_and_other_refusals_are_not(
    hold_seconds: float, monkeypatch: pytest.MonkeyPatch, service: App
) -> None:
    """Callers that try again at once would take the processors from the engine that starts."""
    monkeypatch.setattr(middleware, "HOLD_SECONDS", hold_seconds)
    assert (await service.classify(b"no picture")).status == 415
    service.engine.state, service.engine.reason = "loading", "the model is loading"
    assert (await service.get("/readyz")).status == 503
    assert (await service.get("/healthz")).status == 200
    refused = asyncio.create_task(service.classify())
    if hold_seconds:
        await settle()
        assert not refused.done()
        refused.cancel()
    else:
        assert (await refused).code == "engine_unavailable"
    service.engine.state, service.lifecycle.draining = "ready", True
    assert (await service.classify()).code == "draining"


@pytest.mark.parametrize(("changes", "name"), [({"model_name": "cats"}, "cats"), ({}, load_settings().checkpoint)])
def test_replicas_of_a_model_share_their_pictures_by_its_name(
    changes: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(app_module, "RedisImageStore", lambda url, *, name, **_: names.append(name))
    settings = load_settings({"recent_url": "redis://127.0.0.1", **changes})
    app_module.image_store_of(settings, Metrics(), Clock())
    assert names == [name]


@on_a_loop
async def test_a_request_takes_as_long_in_its_answer_its_log_line_and_the_metrics(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    service = app(clock)
    service.engine.gate.clear()
    with caplog.at_level(logging.INFO, "service.web.middleware"):
        running = asyncio.create_task(service.classify())
        await until(lambda: service.engine.waiting == 1)
        clock.now += 1.234567
        service.engine.gate.set()
        answer = await running
    timings = answer.json["timings_ms"]
    assert (timings["queue"], timings["inference"], timings["total"]) == (1, 2, 1234.57)
    [line] = [record.getMessage() for record in caplog.records if record.name == "service.web.middleware"]
    assert line == f"POST /classify 200 1234.6 ms {answer.headers['x-request-id']}"
    taken = service.metric("vit_request_duration_seconds_sum", endpoint="/classify")
    assert taken == pytest.approx(1.234567)


@on_a_loop
async def test_requests_are_counted_by_endpoint_and_status(service: App) -> None:
    assert all(service.metric("vit_rejected_total", reason=code) == 0 for code in CODES)  # before the first refusal
    await service.classify()
    await service.classify(b"text")
    await service.get("/nope")
    await service.get("/nope/again")
    await service.get("/readyz")
    for endpoint, code, count in (
        ("/classify", "200", 1),
        ("/classify", "415", 1),
        ("other", "404", 2),
        ("/readyz", "200", 1),
    ):
        assert service.metric("vit_requests_total", endpoint=endpoint, code=code) == count
    assert service.metric("vit_request_duration_seconds_count", endpoint="/classify") == 2
    for stage in ("read", "decode", "queue", "inference"):
        assert service.metric("vit_stage_duration_seconds_count", stage=stage) >= 1
    assert service.metric("vit_images_total") == 1
    assert service.metric("vit_top1_score_count") == 1
    assert service.metric("vit_recent_images") == 1
    assert service.metric("vit_recent_bytes") >= SIZE * SIZE * 3


@on_a_loop
async def test_a_defect_of_ours_is_a_problem_document_that_says_nothing(
    service: App, caplog: pytest.LogCaptureFixture
) -> None:
    service.engine.error = KeyError("secret")
    response = await service.classify()
    assert (response.status, response.code) == (500, "internal_error")
    assert b"secret" not in response.content
    assert "secret" in caplog.text
    assert response.headers["x-request-id"] in caplog.text
    assert service.metric("vit_requests_total", endpoint="/classify", code="500") == 1
    assert service_in(service).limiter.in_use == 0
