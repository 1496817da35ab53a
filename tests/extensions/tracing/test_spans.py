"""Exported spans of requests to a whole application."""

import os
import threading
from typing import Any

import pytest

pytest.importorskip(
    "opentelemetry.instrumentation.asgi", reason="the extra `otel` is not installed"
)

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from service.errors import SettingsError
from service.extensions.tracing.extension import exports_spans
from service.extensions.tracing.spans import Tracing
from tests.service.fakes import on_a_loop, png
from tests.service.web.apps import App, app
from tests.service.web.fake_engine import FakeEngine
from tests.service.web.http_communicator import HttpCommunicator

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"


class Traced:
    """An application whose spans are kept; `ask` sends it one request."""

    def __init__(self, service: App | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        service = service or app()
        self.asgi = Tracing(SimpleSpanProcessor(self.exporter)).around(service.asgi, {"/healthz"})

    async def ask(
        self, method: str, path: str, *, sampled: str = "01", **options: Any
    ) -> HttpCommunicator:
        headers = {
            "traceparent": f"00-{TRACE}-{CALLER}-{sampled}",
            "authorization": "Bearer secret",
        }
        communicator = HttpCommunicator(self.asgi, method, path, headers=headers, **options)
        communicator.scope["client"] = ("192.0.2.1", 1)
        return await communicator.run()

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@on_a_loop
async def test_unsampled_requests_have_no_spans() -> None:
    service = Traced()
    assert (await service.ask("POST", "/classify", body=png(7), sampled="00")).status == 200
    assert (await service.ask("GET", "/healthz")).status == 200
    assert service.spans == {}


@on_a_loop
async def test_secrets_are_not_exported() -> None:
    service = Traced()
    await service.ask("GET", "/attention", query="id=unguessable&layer=1")
    exported = service.spans["GET /attention"].to_json()
    assert "layer=1" in exported
    assert not any(secret in exported for secret in ("unguessable", "secret", "192.0.2.1"))


@on_a_loop
async def test_only_failures_are_error_spans() -> None:
    engine = FakeEngine()
    engine.error = ZeroDivisionError("of ours")
    service = Traced(App(app().settings, engine))
    assert (await service.ask("POST", "/classify", body=png(7))).status == 500
    assert not service.spans["POST /classify"].status.is_ok
    assert (await service.ask("GET", "/nothing")).status == 404
    assert service.spans["GET /nothing"].status.is_unset


@on_a_loop
async def test_a_hanging_collector_delays_no_exit() -> None:
    released = threading.Event()

    class Hanging(SpanProcessor):
        def shutdown(self) -> None:
            released.wait()

    await Tracing(Hanging()).close(0.01)
    released.set()


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.mark.parametrize(
    ("environment", "exported"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "True"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
    ],
)
def test_standard_variables_enable_tracing(
    environment: dict[str, str], exported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    assert exports_spans() is exported


def test_a_missing_exporter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    with pytest.raises(
        SettingsError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL='grpc': expected http/protobuf"
    ):
        exports_spans()
    monkeypatch.setattr(os, "environ", {"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4318"})
    with pytest.raises(SettingsError, match=r"'localhost:4318': expected a URL such as http://"):
        exports_spans()


def test_a_wrong_sdk_variable_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4096")
    with pytest.raises(SettingsError, match="OTEL_"):
        Tracing()
