"""Attributes from a request's head, and the metrics of the semantic conventions."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")

from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from service.tracing.http import request_attributes
from tests.service.fakes import on_a_loop, png
from tests.service.tracing.recorder import UNSAMPLED, Recorder
from tests.service.web.apps import until


def of_host(host: bytes) -> tuple[Any, Any]:
    scope = {
        "method": "GET",
        "scheme": "http",
        "path": "/",
        "http_version": "1.1",
        "query_string": b"",
        "headers": [(b"host", host)],
    }
    found = request_attributes(scope)
    return found.get("server.address"), found.get("server.port")


@pytest.mark.parametrize(
    ("host", "address", "port"),
    [
        (b"photos.example", "photos.example", None),
        (b"photos.example:8000", "photos.example", 8000),
        (b"[::1]:8000", "::1", 8000),
        (b"[2001:db8::7]", "2001:db8::7", None),
        (b"", None, None),
        (b"a:b:c", None, None),
        (b"photos.example:123456", None, None),
        (b"\xff\xfe", "ÿþ", None),
    ],
)
def test_the_server_is_called_what_its_caller_calls_it(host: bytes, address: str | None, port: int | None) -> None:
    assert of_host(host) == (address, port)


class Reader(InMemoryMetricReader):
    """Gives the points of a metric: attributes and value, or count and sum."""

    def points(self, name: str) -> dict[tuple[tuple[str, Any], ...], Any]:
        data = self.get_metrics_data()
        assert data is not None
        found = {}
        for resource in data.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if metric.name == name:
                        for point in metric.data.data_points:
                            value = getattr(point, "value", None)
                            key = tuple(sorted((point.attributes or {}).items()))
                            found[key] = point.count if value is None else value  # type: ignore[union-attr]
        return found


@on_a_loop
async def test_requests_are_measured_by_the_conventions_sampled_or_not() -> None:
    reader = Reader()
    service = Recorder([reader]).app()
    service.engine.gate.clear()
    task = service.communicator("POST", "/classify", headers={"traceparent": UNSAMPLED}, body=png(1)).start()
    await until(lambda: service.engine.waiting == 1)
    head = (("http.request.method", "POST"), ("url.scheme", "http"))
    assert reader.points("http.server.active_requests") == {head: 1}
    service.engine.gate.set()
    await task
    service.lifecycle.draining = True
    await service.classify()
    await service.get("/healthz")  # a probe
    assert reader.points("http.server.active_requests") == {head: 0}
    common = {
        "http.request.method": "POST",
        "http.route": "/classify",
        "network.protocol.version": "1.1",
        "url.scheme": "http",
    }
    answered = {**common, "http.response.status_code": 200}
    refused = {**common, "http.response.status_code": 503, "error.type": "draining"}
    assert reader.points("http.server.request.duration") == {
        tuple(sorted(each.items())): 1 for each in (answered, refused)
    }


@on_a_loop
async def test_without_a_reader_nothing_is_measured() -> None:
    assert Recorder().tracer.metrics is None
