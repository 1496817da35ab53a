"""OpenTelemetry starts when it is asked for, as its variables say, and ends in time whatever the collector does."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from service.engine.messages import BatchReport
from service.errors import SettingsError
from service.metrics.metrics import Metrics
from service.settings import Settings, load_settings
from service.tracing.start import batch_observer, check_environment, start_telemetry

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")

from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from service.tracing import telemetry as telemetry_module
from service.tracing.spans import context_of
from service.tracing.telemetry import RequestIds, Sparingly, Telemetry, resource_of_process
from tests.service.fakes import PATIENCE

EVERY_PROCESS = """
import sys
import service.cli.serve, service.cluster.run, service.cluster.worker, service.cluster.engine_process
from service.metrics.metrics import Metrics
from service.settings import load_settings
from service.tracing.start import start_telemetry
assert start_telemetry(load_settings()) is None
# FastAPI imports the package with the interfaces, and uses it nowhere here.
assert not [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
assert [name for name in sys.modules if name.startswith("service.tracing.")] == ["service.tracing.start"]
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Settings:
    return load_settings({"otel": True})


def test_nothing_of_it_is_imported_unless_it_is_asked_for() -> None:
    subprocess.run([sys.executable, "-c", EVERY_PROCESS], check=True)


def test_an_engine_without_it_reports_to_its_metrics_alone() -> None:
    count = Metrics().observe_batch
    assert batch_observer(count, None) is count


def report() -> BatchReport:
    return BatchReport(device="cpu", size=1, padding=0, release="idle", inference_seconds=0.1)


def test_an_engine_with_it_reports_to_its_metrics_and_to_the_tracer() -> None:
    heard: list[str] = []
    tracer = SimpleNamespace(observe=lambda _: heard.append("tracer"))
    telemetry = SimpleNamespace(batch_tracer=lambda: tracer)
    batch_observer(lambda _: heard.append("metrics"), cast(Telemetry, telemetry))(report())
    assert heard == ["metrics", "tracer"]


def test_every_handler_adds_the_ids_and_lets_few_complaints_through(
    asked: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = logging.NullHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    telemetry = start_telemetry(asked, {"OTEL_TRACES_EXPORTER": "none"})
    assert isinstance(telemetry, Telemetry)
    assert [type(each) for each in handler.filters] == [RequestIds, Sparingly]


def test_metrics_are_exported_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, ended = InMemoryMetricReader(), list[object]()
    monkeypatch.setattr(reader, "shutdown", lambda **_: ended.append(reader))
    monkeypatch.setattr(telemetry_module, "OTLPMetricExporter", lambda: "exporter")
    monkeypatch.setattr(telemetry_module, "PeriodicExportingMetricReader", {"exporter": reader}.__getitem__)
    telemetry = Telemetry.from_environment({"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "otlp"})
    assert telemetry.request_tracer().metrics is not None
    telemetry.close(PATIENCE)
    assert ended == [reader]


def test_nothing_is_left_to_the_end_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[object] = []
    monkeypatch.setattr(atexit, "register", left.append)
    telemetry = Telemetry(Resource({}), [Hanging()], [InMemoryMetricReader()])
    telemetry.request_tracer()
    telemetry.batch_tracer()
    assert left == []


def test_the_standards_switch_turns_it_off(asked: Settings) -> None:
    assert start_telemetry(asked, {"OTEL_SDK_DISABLED": "TRUE"}) is None


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "http/protobuf"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "otlp or none"),
        ("OTEL_METRICS_EXPORTER", "prometheus", "otlp or none"),
    ],
)
def test_what_is_not_here_is_refused_in_one_line(name: str, value: str, allowed: str, asked: Settings) -> None:
    with pytest.raises(SettingsError) as raised:
        check_environment(asked, {name: value})
    assert str(raised.value) == f"{name}='{value}': expected {allowed}"
    check_environment(load_settings(), {name: value})  # of others on this machine


def test_what_the_sdk_refuses_is_one_line(asked: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with pytest.raises(SettingsError, match=r"OTEL_\.\.\.\): max_queue_size must be a positive integer"):
        start_telemetry(asked)


def test_nothing_is_exported_where_the_exporters_are_none() -> None:
    telemetry = Telemetry.from_environment({"OTEL_TRACES_EXPORTER": "none"})
    tracer = telemetry.request_tracer()
    assert tracer.tracer.sampler is ALWAYS_OFF  # type: ignore[attr-defined]  # the SDK's
    assert tracer.metrics is None
    telemetry.close()


def test_the_service_is_called_what_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    first, second = (resource_of_process().attributes for _ in range(2))
    assert (first["service.name"], first["process.pid"]) == ("vitserve", os.getpid())
    assert first["service.instance.id"] != second["service.instance.id"]
    monkeypatch.setenv("OTEL_SERVICE_NAME", "cats")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=pod-7,deployment.environment.name=test")
    found = resource_of_process().attributes
    assert found["service.name"] == "cats"
    assert found["service.instance.id"] == "pod-7"
    assert found["deployment.environment.name"] == "test"
    assert found["service.version"]


class Hanging(SpanProcessor):
    """Exports to a collector that never answers, and never ends."""

    def __init__(self) -> None:
        self.closing = threading.Event()
        self.released = threading.Event()

    def on_end(self, span: ReadableSpan) -> None:
        pass

    def shutdown(self) -> None:
        self.closing.set()
        self.released.wait(PATIENCE)


def test_a_collector_that_hangs_does_not_hold_the_end() -> None:
    processor = Hanging()
    Telemetry(Resource({}), [processor]).close(seconds=0.001)
    assert processor.closing.wait(PATIENCE)
    assert not processor.released.is_set()
    processor.released.set()


def test_all_that_is_closed_shares_the_seconds_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    now, joined, ended = 100.0, list[float](), list[str]()

    class Thread:
        def __init__(self, target: Callable[[], object], name: str, daemon: bool) -> None:
            assert daemon, "the process would wait for it"
            self._target = target

        def start(self) -> None:
            self._target()

        def join(self, seconds: float) -> None:
            nonlocal now
            joined.append(seconds)
            now += 2

    class Quick(SpanProcessor):
        def shutdown(self) -> None:
            ended.append("processor")

    monkeypatch.setattr(telemetry_module, "threading", SimpleNamespace(Thread=Thread))
    monkeypatch.setattr(telemetry_module, "time", SimpleNamespace(monotonic=lambda: now))
    Telemetry(Resource({}), [Quick(), Quick(), Quick()]).close()
    assert (joined, ended) == ([3, 1, 0], ["processor"] * 3)


def test_a_context_is_that_of_another_process() -> None:
    context = context_of("00-0000000000000000000000000000000a-000000000000000b-10")
    assert (context.trace_id, context.span_id, context.trace_flags, context.is_remote) == (10, 11, 16, True)


def test_a_complaint_of_the_exporter_is_logged_once_a_minute() -> None:
    now = 0.0
    sparingly = Sparingly("opentelemetry", clock=lambda: now)

    def passes(name: str, text: str = "no answer: %s") -> bool:
        return sparingly.filter(logging.LogRecord(name, logging.WARNING, "", 0, text, (now,), None))

    assert passes("opentelemetry.exporter")
    now = 59.0
    assert not passes("opentelemetry.exporter")
    assert passes("opentelemetry.exporter", "another")
    assert passes("opentelemetry.sdk")
    assert passes("vitserve")
    assert passes("vitserve")
    now = 60.0
    assert passes("opentelemetry.exporter")
