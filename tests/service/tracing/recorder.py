"""OpenTelemetry with the real SDK, whose spans are kept in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from service.settings import load_settings
from service.tracing.spans import traceparent_of
from service.tracing.telemetry import Telemetry
from tests.service.web.apps import App

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = CALLER[:-1] + "0"
TRACE_ID, SPAN_ID = CALLER.split("-")[1:3]


class Recorder:
    """Keeps each span when it ends."""

    def __init__(self, readers: Sequence[MetricReader] = ()) -> None:
        self.exporter = InMemorySpanExporter()
        self.telemetry = Telemetry(Resource({}), [SimpleSpanProcessor(self.exporter)], readers)
        self.tracer = self.telemetry.request_tracer()

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def one(self, name: str) -> ReadableSpan:
        """The only span of this name."""
        [span] = [span for span in self.spans if span.name == name]
        return span

    def app(self, **parts: Any) -> App:
        """An application whose requests are recorded; settings beside parts of `App`."""
        fields = {name: parts.pop(name) for name in list(parts) if name in App.__dataclass_fields__}
        return App(load_settings({"decode_threads": 1, **parts}), tracer=self.tracer, **fields)


def ids(span: ReadableSpan) -> str:
    """Its context as a traceparent."""
    assert span.context is not None
    return traceparent_of(span.context)


def parent_of(span: ReadableSpan) -> str | None:
    return None if span.parent is None else traceparent_of(span.parent)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})
