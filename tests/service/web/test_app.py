"""What all routes have in common: draining, measures, defects, start and stop, large documents."""

import asyncio
import base64
import json
import logging

import pytest

from service.web import admit, body
from service.web.problems import codes
from service.web.refusal_pace import RefusalPace
from service.web.routes import classify
from tests.service.fakes import CLASSES, SIZE, on_a_loop, png, until
from tests.service.web.apps import App, Clock, app, form, kept, service_in, settle
from tests.service.web.thread_names import BIG, LOOP, ThreadNames


@on_a_loop
async def test_a_draining_service_refuses_work(
    service: App,
) -> None:
    image_id = await kept(service)
    assert (await service.get("/readyz")).status == 200
    service.lifecycle.stopping = True
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
async def test_a_long_batch_ends_readiness() -> None:
    service = app()
    service.engine.reason = "a batch has computed for 11 s: the device may hang"
    response = await service.get("/readyz")
    assert (response.status, response.code) == (503, "engine_unavailable")
    assert (await service.classify()).status == 200


@on_a_loop
async def test_only_repeated_callers_are_delayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delays = iter([0.0, 3600.0])
    monkeypatch.setattr(RefusalPace, "delay", lambda *_: next(delays))
    service = app()
    service.engine.state = "loading"
    service.engine.reason = "the model is loading"
    assert (await service.classify()).code == "engine_unavailable"
    again = asyncio.create_task(service.classify())
    assert (await service.get("/readyz")).status == 503
    assert (await service.get("/healthz")).status == 200
    await settle()
    assert not again.done()
    again.cancel()


@on_a_loop
async def test_repeated_mistakes_are_answered_late(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = iter([0.0, 3600.0])
    monkeypatch.setattr(RefusalPace, "delay_of", lambda *_: next(delays))
    service = app()
    mistake = {"headers": {"content-type": "multipart/form-data"}, "body": b"no boundary"}
    assert (await service.request("POST", "/classify", **mistake)).code == "malformed_request"
    again = asyncio.create_task(service.request("POST", "/classify", **mistake))
    assert (await service.classify()).status == 200
    assert not again.done()
    again.cancel()


@on_a_loop
async def test_one_duration_is_told_everywhere(
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
    [line] = [
        record.getMessage() for record in caplog.records if record.name == "service.web.middleware"
    ]
    assert line == f"POST /classify 200 1234.6 ms {answer.headers['x-request-id']}"
    taken = service.metric("vit_request_duration_seconds_sum", endpoint="/classify")
    assert taken == pytest.approx(1.234567)


@on_a_loop
async def test_requests_are_counted_by_endpoint(service: App) -> None:
    assert all(
        service.metric("vit_rejected_total", reason=code) == 0 for code in codes()
    )  # before the first refusal
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
async def test_an_internal_error_reveals_nothing(
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


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the threads on which documents are read and written."""
    watched = ThreadNames(monkeypatch)
    watched.watch(body, "picture_of_json")
    watched.watch(classify, "classification_fields")
    return watched.names


@on_a_loop
@pytest.mark.parametrize(("large", "thread"), [(1, BIG), (10_000, LOOP)])
async def test_large_json_does_not_block_the_loop(
    large: int, thread: str, threads: set[str], monkeypatch: pytest.MonkeyPatch, service: App
) -> None:
    monkeypatch.setattr(admit, "LARGE", large)
    in_json = json.dumps({"image": base64.b64encode(png(7)).decode()}).encode()
    headers = {"content-type": "application/json"}
    single = await service.request(
        "POST", "/classify", query=f"top_k={CLASSES}", headers=headers, body=in_json
    )
    assert [one["index"] for one in single.json["predictions"]][:1] == [7]
    batch = await service.request("POST", "/classify/batch", **form(png(1), b"text", png(2)))
    codes = [one.get("error", {}).get("code") for one in batch.json["results"]]
    assert codes == [None, "unsupported_media_type", None]
    assert threads == {thread}
