"""The ids of a request's span elsewhere: in the log, and as exemplars of the metrics."""

from __future__ import annotations

import json
import logging

import pytest

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")

from service.logs import JsonFormatter
from service.tracing.telemetry import RequestIds
from tests.service.fakes import on_a_loop, png
from tests.service.tracing.recorder import CALLER, Recorder, ids


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@on_a_loop
async def test_every_line_of_a_request_in_the_json_log_has_its_ids(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(RequestIds())
    service = recorder.app()
    service.engine.error = ZeroDivisionError("of ours")
    await service.request("POST", "/classify", headers={"traceparent": CALLER}, body=png(7))
    logging.getLogger("vitserve").info("of no request")
    *lines, other = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert [line["message"].partition(" ")[0] for line in lines] == ["request", "POST"]
    _, trace_id, span_id, flags = ids(recorder.one("POST /classify")).split("-")
    for line in lines:
        assert (line["trace_id"], line["span_id"], line["trace_flags"]) == (trace_id, span_id, flags)
    assert lines[1]["status"] == 500
    assert not {"trace_id", "span_id", "trace_flags"} & other.keys()


@on_a_loop
async def test_a_bucket_of_the_durations_names_a_request_that_fell_into_it(recorder: Recorder) -> None:
    service = recorder.app()
    answer = await service.request("POST", "/classify", headers={"traceparent": CALLER}, body=png(7))
    _, trace_id, span_id, _ = answer.headers["traceresponse"].split("-")
    scrape = await service.get("/metrics", accept="application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert scrape.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    lines = [line for line in scrape.content.decode().splitlines() if "trace_id" in line]
    [line] = lines
    assert line.startswith('vit_request_duration_seconds_bucket{endpoint="/classify",le=')
    assert f'# {{span_id="{span_id}",trace_id="{trace_id}"}} ' in line
    plain = await service.get("/metrics")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"trace_id" not in plain.content
