"""The spans of requests: whose children they are, what they say, and when there are none."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")

from opentelemetry.trace import SpanKind, StatusCode

from service.engine.messages import InferenceRequest, InferenceResult
from service.errors import DeadlineExceeded, EngineUnavailable, InferenceFailed, QueueFull
from service.tracing.spans import traceparent_of
from tests.service.fakes import on_a_loop, png
from tests.service.tracing.recorder import CALLER, SPAN_ID, TRACE_ID, UNSAMPLED, Recorder, attributes, ids, parent_of
from tests.service.web.apps import App, form, until
from tests.service.web.fake_engine import FakeEngine

BATCH = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = ["read", "decode", "queue", "inference"]


class TracedEngine(FakeEngine):
    """Hands on which spans its images came from, and names that of their batch."""

    def __init__(self) -> None:
        super().__init__()
        self.traceparents: list[str | None] = []

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        self.traceparents.append(request.traceparent)
        result = await super().infer(request, timeout=timeout)
        return replace(result, batch_traceparent=BATCH if request.traceparent else None)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


async def post(service: App, path: str = "/classify", body: bytes | None = None, **headers: str) -> Any:
    headers = {"content-type": "image/png"} | {name.replace("_", "-"): value for name, value in headers.items()}
    path, _, query = path.partition("?")
    return await service.request("POST", path, query=query, headers=headers, body=png(7) if body is None else body)


# Whose


@on_a_loop
async def test_a_request_is_a_child_of_its_caller_and_its_stages_are_children_of_the_request(
    recorder: Recorder,
) -> None:
    service = recorder.app(engine=TracedEngine())
    answer = await post(service, traceparent=CALLER, tracestate="vendor=1,other=2")
    assert answer.status == 200
    assert recorder.names == [*STAGES, "POST /classify"]
    request = recorder.one("POST /classify")
    assert request.kind is SpanKind.SERVER
    assert parent_of(request) == CALLER
    assert request.context is not None
    assert request.context.trace_state.to_header() == "vendor=1,other=2"
    for stage in STAGES:
        span = recorder.one(stage)
        assert parent_of(span) == ids(request)
        assert span.kind is SpanKind.INTERNAL
        assert span.context is not None
        assert span.context.trace_state.to_header() == "vendor=1,other=2"
    assert answer.headers["traceresponse"] == ids(request)


@on_a_loop
async def test_the_batch_is_linked_and_hears_whose_images_it_has(recorder: Recorder) -> None:
    engine = TracedEngine()
    await post(recorder.app(engine=engine), traceparent=CALLER)
    inference = recorder.one("inference")
    assert [traceparent_of(link.context) for link in inference.links] == [BATCH]
    assert attributes(inference) == {"vitserve.batch.size": 1}
    assert engine.traceparents == [ids(recorder.one("POST /classify"))]


@on_a_loop
async def test_stages_follow_one_another_within_the_request_and_last_as_long_as_the_metrics_say(
    recorder: Recorder,
) -> None:
    await post(recorder.app())
    request, *stages = (recorder.one(name) for name in ("POST /classify", *STAGES))
    times = [time for span in stages for time in (span.start_time or 0, span.end_time or 0)]
    assert times[4] < times[5] == times[6] < times[7]
    assert (times[5] - times[4], times[7] - times[6]) == (1_000_000, 2_000_000)  # as the engine measured them
    assert (request.start_time or 0) <= times[0] <= times[1]
    assert times[7] <= (request.end_time or 0)


@on_a_loop
async def test_each_picture_of_a_request_has_stages_of_its_own(recorder: Recorder) -> None:
    engine = TracedEngine()
    answer = await recorder.app(engine=engine).request("POST", "/classify/batch", **form(png(1), b"no picture", png(3)))
    assert answer.status == 200
    assert sorted(recorder.names) == sorted(
        ["read", *3 * ["decode"], *2 * ["queue", "inference"], "POST /classify/batch"]
    )
    request = ids(recorder.one("POST /classify/batch"))
    assert {parent_of(span) for span in recorder.spans} == {request, None}
    assert engine.traceparents == [request] * 2
    [failed] = [span for span in recorder.spans if span.status.status_code is StatusCode.ERROR]
    assert (failed.name, attributes(failed)["error.type"]) == ("decode", "UnsupportedImageFormat")


@on_a_loop
async def test_a_caller_who_is_not_sampled_gets_no_span_and_costs_the_engine_nothing(recorder: Recorder) -> None:
    engine = TracedEngine()
    service = recorder.app(engine=engine)
    answer = await post(service, traceparent=UNSAMPLED)
    assert recorder.names == []
    assert engine.traceparents == [None]
    version, trace_id, span_id, flags = answer.headers["traceresponse"].split("-")
    assert (version, trace_id, flags) == ("00", TRACE_ID, "00")
    assert span_id != SPAN_ID
    assert b"trace_id" not in service.metrics.render_openmetrics()


@on_a_loop
@pytest.mark.parametrize(
    "given",
    ["", "nonsense", CALLER[:-3], CALLER.upper(), CALLER.replace("4bf9", "zzzz"), "00-" + "0" * 32 + CALLER[35:]],
)
async def test_a_traceparent_that_cannot_be_read_begins_a_trace_of_its_own(given: str, recorder: Recorder) -> None:
    answer = await post(recorder.app(), traceparent=given, tracestate="vendor=1")
    assert answer.status == 200
    request = recorder.one("POST /classify")
    assert request.parent is None
    assert TRACE_ID not in answer.headers["traceresponse"]


@on_a_loop
async def test_what_a_caller_carries_as_baggage_is_not_logged(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    for baggage in ("secret" * 2000, "secret", "a=b," * 500):
        assert (await recorder.app().get("/model", baggage=baggage)).status == 200
    assert [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")] == []


@on_a_loop
async def test_requests_side_by_side_are_not_mixed_up(recorder: Recorder) -> None:
    service = recorder.app()
    callers = [f"00-{number:032x}-{number:016x}-01" for number in range(1, 9)]
    await asyncio.gather(*(post(service, traceparent=caller) for caller in callers))
    requests = {ids(span): parent_of(span) for span in recorder.spans if span.name == "POST /classify"}
    assert sorted(requests.values(), key=str) == callers
    stages = [parent_of(span) for span in recorder.spans if span.name in STAGES]
    assert sorted(map(str, stages)) == sorted(list(requests) * len(STAGES))


# What


@on_a_loop
async def test_a_request_says_what_the_conventions_ask_for(recorder: Recorder) -> None:
    service = recorder.app(api_keys="web:topsecret")
    await post(
        service,
        "/classify?top_k=2",
        host="photos.example:8443",
        user_agent="curl/8",
        authorization="Bearer topsecret",
        x_request_id="mine",
    )
    span = recorder.one("POST /classify")
    assert attributes(span) == {
        "http.request.method": "POST",
        "http.route": "/classify",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "url.path": "/classify",
        "url.query": "top_k=2",
        "server.address": "photos.example",
        "server.port": 8443,
        "network.protocol.version": "1.1",
        "user_agent.original": "curl/8",
        "vitserve.request_id": "mine",
        "vitserve.api_key.name": "web",
    }
    assert span.status.status_code is StatusCode.UNSET


@on_a_loop
async def test_the_id_of_a_kept_picture_is_not_told(recorder: Recorder) -> None:
    service = recorder.app()
    image_id = (await post(service)).json["id"]
    await service.get("/attention", query=f"format=json&id={image_id}&method=cls")
    span = recorder.one("GET /attention")
    assert attributes(span)["url.query"] == "format=json&id=REDACTED&method=cls"
    assert image_id not in span.to_json()


@on_a_loop
@pytest.mark.parametrize(
    ("method", "path", "name", "status"),
    [
        ("GET", "/nothing/" + "x" * 2000, "GET", 404),
        ("GET", "/classify", "GET /classify", 405),
        ("BREW", "/classify", "HTTP /classify", 405),
        ("GET", "/v2/models/fake/stats", "GET /v2/models/{name}/stats", 200),
    ],
)
async def test_names_are_few_whatever_is_asked(
    method: str, path: str, name: str, status: int, recorder: Recorder
) -> None:
    await recorder.app().request(method, path)
    span = recorder.one(name)
    found = attributes(span)
    assert found["http.response.status_code"] == status
    assert len(found["url.path"]) <= 500
    assert found["http.request.method"] == ("_OTHER" if method == "BREW" else method)
    assert found.get("http.request.method_original") == ("BREW" if method == "BREW" else None)
    assert "error.type" not in found  # the caller's
    assert span.status.status_code is StatusCode.UNSET


@on_a_loop
@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/v2/health/ready"])
async def test_probes_have_no_span(path: str, recorder: Recorder) -> None:
    answer = await recorder.app().get(path, traceparent=CALLER)
    assert recorder.names == []
    assert "traceresponse" not in answer.headers


# Failures


@on_a_loop
@pytest.mark.parametrize(
    ("error", "status", "code", "stage"),
    [
        (InferenceFailed("no"), 500, "inference_failed", "inference"),
        (QueueFull("no"), 503, "queue_full", "queue"),
        (EngineUnavailable("no"), 503, "engine_unavailable", "queue"),
        (DeadlineExceeded("no"), 504, "deadline_exceeded", "queue"),
    ],
)
async def test_a_failure_names_its_problem_and_its_stage(
    error: Exception, status: int, code: str, stage: str, recorder: Recorder
) -> None:
    service = recorder.app()
    service.engine.error = error
    await post(service, traceparent=CALLER)
    request, failed = recorder.one("POST /classify"), recorder.one(stage)
    assert attributes(request)["http.response.status_code"] == status
    assert attributes(request)["error.type"] == code
    assert attributes(failed) == {"error.type": type(error).__name__}
    assert failed.status.description == "no"
    assert failed.start_time is not None
    assert failed.end_time is not None
    assert failed.start_time <= failed.end_time
    assert request.status.status_code is failed.status.status_code is StatusCode.ERROR
    assert parent_of(failed) == ids(request)


@on_a_loop
async def test_a_body_that_is_refused_fails_in_its_reading_and_a_picture_in_its_decoding(recorder: Recorder) -> None:
    service = recorder.app(max_upload_bytes=100)
    assert (await post(service, body=bytes(200))).status == 413
    assert attributes(recorder.one("read"))["error.type"] == "UploadTooLarge"
    assert (await post(service, body=b"no picture")).status == 415
    assert attributes(recorder.one("decode"))["error.type"] == "UnsupportedImageFormat"
    requests = [span for span in recorder.spans if span.name == "POST /classify"]
    assert [span.status.status_code for span in requests] == [StatusCode.UNSET] * 2  # the caller's errors


@on_a_loop
async def test_a_caller_who_goes_away_leaves_a_span_that_says_so(recorder: Recorder) -> None:
    service = recorder.app()
    service.engine.gate.clear()
    communicator = service.communicator("POST", "/classify", headers={"content-type": "image/png"}, body=png(1))
    task = communicator.start()
    await until(lambda: service.engine.waiting == 1)
    communicator.disconnect()
    await task
    found = attributes(recorder.one("POST /classify"))
    assert found["error.type"] == "client_disconnected"
    assert "http.response.status_code" not in found


@on_a_loop
async def test_a_defect_of_ours_is_in_the_span_with_its_traceback(recorder: Recorder) -> None:
    service = recorder.app()
    service.engine.error = ZeroDivisionError("of ours")
    assert (await post(service)).status == 500
    span = recorder.one("POST /classify")
    assert attributes(span)["error.type"] == "internal_error"
    [event] = span.events
    assert event.name == "exception"
    assert "ZeroDivisionError: of ours" in str((event.attributes or {})["exception.stacktrace"])
