"""OpenTelemetry starts when it is asked for, as its variables say, and ends in time whatever the collector does."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

from service.errors import SettingsError
from service.metrics.metrics import Metrics
from service.settings import Settings, load_settings
from service.tracing.start import batch_observer, check_environment, start_telemetry

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from service.tracing.log_records import Sparingly
from service.tracing.telemetry import Telemetry, resource_of_process
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
    assert first["service.name"] == "vitserve"
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
