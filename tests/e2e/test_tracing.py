"""Traces of a real service, as a collector receives them over the wire, and a collector that is not there."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("opentelemetry.proto", reason="OpenTelemetry is not installed")

from tests.e2e.collector import collecting
from tests.e2e.processes import Processes
from tests.e2e.serving import Pictures, Serve, Served, client
from tests.e2e.test_dashboard import Prometheus
from tests.launcher import until

pytestmark = pytest.mark.timeout(120)

CALLERS = 40
"""Enough, on connections of their own, for both workers to have some."""

STAGES = ("read", "decode", "queue", "inference")
DURATIONS = "vit_request_duration_seconds_bucket"
OPENMETRICS = {"Accept": "application/openmetrics-text"}


def test_a_request_is_followed_from_its_caller_through_a_worker_and_the_engine(
    serve: Serve, pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "cats")
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")  # so all comes when the service stops
        server = serve(workers=2, otel=True, log_format="json")
        processes = Processes(server)
        workers, engine = processes.workers, processes.engine
        for number in range(1, CALLERS + 1):
            headers = {"traceparent": f"00-{number:032x}-{number:016x}-01", "tracestate": f"caller={number}"}
            with client(server.url, verify=False) as own:
                answer = own.post("/classify", content=pictures.files[number], headers=headers)
                assert answer.status_code == 200
                assert answer.headers["traceresponse"].startswith(f"00-{number:032x}-")
        exemplars = ""
        for _ in range(CALLERS):  # whichever worker answers has some
            with client(server.url, verify=False) as own:
                exemplars = own.get("/metrics", headers=OPENMETRICS).text
            assert exemplars.endswith("# EOF\n")
            assert ' # {span_id="' in exemplars
        assert server.process.terminate() == 0

    spans = {span.id: span for span in collector.spans}
    requests = {span.id[0]: span for span in collector.named("POST /classify")}
    assert len(requests) == CALLERS
    assert {span.process["process.pid"] for span in requests.values()} == workers
    for number in range(1, CALLERS + 1):
        request = requests[f"{number:032x}"]
        assert request.parent == f"{number:016x}"
        assert request.message.trace_state == f"caller={number}"
        assert request.process["service.name"] == "cats"
        assert request.attributes["http.response.status_code"] == 200
        assert request.attributes["server.port"] == server.port
        stages = [span for span in collector.spans if span.parent == request.id[1]]
        assert sorted(span.name for span in stages) == sorted(STAGES)
        for span in stages:
            assert span.id[0] == request.id[0]
            assert span.process == request.process
        [link] = next(span.links for span in stages if span.name == "inference")
        batch = spans[link]
        assert (batch.name, batch.process["process.pid"]) == ("batch", engine)
        assert request.id in batch.links
        assert batch.message.end_time_unix_nano > batch.message.start_time_unix_nano
    assert sum(span.attributes["vitserve.batch.size"] for span in collector.named("batch")) == CALLERS

    durations = [point for point in collector.points if point.name == "http.server.request.duration"]
    assert sum(point.message.count for point in durations) == CALLERS
    assert {point.process["process.pid"] for point in durations} == workers
    assert len({point.process["service.instance.id"] for point in durations}) == 2

    lines = [json.loads(line) for line in server.log.splitlines()]
    logged = {line["trace_id"]: line for line in lines if line.get("path") == "/classify"}
    assert {trace_id: line["span_id"] for trace_id, line in logged.items()} == {
        trace_id: span.id[1] for trace_id, span in requests.items()
    }
    assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def forsaken(serve_module: Serve) -> Iterator[Served]:
    """A service whose collector never answers."""
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as silent:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
        patch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
        patch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
        yield serve_module(otel=True)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_prometheus_takes_the_exemplars(forsaken: Served, pictures: Pictures, tmp_path: Path) -> None:
    answer = forsaken.classify(pictures.files[0])
    _, trace_id, span_id, _ = answer.headers["traceresponse"].split("-")
    options = ("--enable-feature=exemplar-storage",)
    with Prometheus(tmp_path, f"127.0.0.1:{forsaken.port}", options=options) as prometheus:
        until(lambda: bool(prometheus.query(DURATIONS)))
        now = time.time()
        times = {"start": f"{now - 3600}", "end": f"{now + 3600}"}
        url = f"{prometheus.url}/api/v1/query_exemplars"
        [series] = httpx.get(url, params={"query": DURATIONS, **times}).json()["data"]
    assert series["seriesLabels"]["endpoint"] == "/classify"
    assert series["exemplars"][0]["labels"] == {"trace_id": trace_id, "span_id": span_id}


def test_a_collector_that_never_answers_costs_no_request_and_does_not_hold_the_end(
    forsaken: Served, pictures: Pictures
) -> None:
    """The last one that uses this service."""
    for index in range(20):
        answer = forsaken.classify(pictures.files[index])
        assert answer.status_code == 200
        pictures.check(index, answer.json())
    assert forsaken.process.terminate() == 0
    assert "Queue full, dropping Span" in forsaken.log
    assert "Traceback" not in forsaken.log
