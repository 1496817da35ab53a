"""Traces of a real service, received by a collector over the wire, and an absent collector."""

import json

import pytest

pytest.importorskip("opentelemetry.proto", reason="OpenTelemetry is not installed")

from tests.e2e.collector import collecting
from tests.e2e.processes import Processes
from tests.e2e.serving import Pictures, Serve, client

pytestmark = pytest.mark.timeout(120)

CALLERS = 40
"""Enough requests, each on a new connection, to reach both workers."""

STAGES = ("read", "decode", "queue", "inference")


def test_a_trace_leads_from_caller_to_worker(
    serve: Serve, pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "cats")
        monkeypatch.setenv(
            "OTEL_BSP_SCHEDULE_DELAY", "3600000"
        )  # so that all spans are exported when the service stops
        server = serve(workers=2, log_format="json")
        workers = Processes(server).workers
        for number in range(1, CALLERS + 1):
            headers = {
                "traceparent": f"00-{number:032x}-{number:016x}-01",
                "tracestate": f"caller={number}",
            }
            with client(server.url) as own:
                answer = own.post("/classify", content=pictures.files[number], headers=headers)
                assert answer.status_code == 200
                assert answer.headers["traceresponse"].startswith(f"00-{number:032x}-")
        assert server.process.terminate() == 0

    requests = {span.id[0]: span for span in collector.named("POST /classify")}
    assert len(requests) == CALLERS
    assert {span.process["process.pid"] for span in requests.values()} == workers
    for number in range(1, CALLERS + 1):
        request = requests[f"{number:032x}"]
        assert request.parent == f"{number:016x}"
        assert request.message.trace_state == f"caller={number}"
        assert request.process["service.name"] == "cats"
        assert request.attributes["http.response.status_code"] == 200
        stages = [span for span in collector.spans if span.parent == request.id[1]]
        assert sorted(span.name for span in stages) == sorted(STAGES)
        [inference] = [span for span in stages if span.name == "inference"]
        assert inference.attributes["vitserve.batch.size"] >= 1
        for span in stages:
            assert span.id[0] == request.id[0]
            assert span.process == request.process

    lines = [json.loads(line) for line in server.log.splitlines()]
    logged = {line["trace_id"]: line for line in lines if line.get("path") == "/classify"}
    assert {trace_id: line["span_id"] for trace_id, line in logged.items()} == {
        trace_id: span.id[1] for trace_id, span in requests.items()
    }
    assert "Traceback" not in server.log
