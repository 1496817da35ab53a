"""OpenTelemetry of one process: exporters by OTLP over HTTP, with threads of their own, and what fills them.

It is made in the process that uses it, never before a fork. What is exported waits in a bounded queue; when that is
full, or the collector does not answer, spans are dropped. The variables `OTEL_...` are read by the SDK.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Self

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import get_global_textmap
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import format_span_id, format_trace_id, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from service.tracing.http import HttpMetrics
from service.tracing.spans import BatchTracer, RequestTracer
from vitserve import __version__

_SCOPE: Final = "vitserve"
_LAST_EXPORT_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 60.0


class Telemetry:
    """Exports the spans and the HTTP metrics of one process.

    Args:
        processors: take each span that ends.
        readers: of the HTTP metrics; without a reader they are not measured.
    """

    def __init__(
        self, resource: Resource, processors: Sequence[SpanProcessor], readers: Sequence[MetricReader] = ()
    ) -> None:
        self._resource = resource
        self._processors = processors
        self._meters = MeterProvider(readers, resource, shutdown_on_exit=False) if readers else None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Return exporters as the standard's variables ask for them; metrics only by `OTEL_METRICS_EXPORTER=otlp`.

        Raises:
            ValueError: one of the variables has a wrong value.
        """
        processors, readers = [], []
        if environment.get("OTEL_TRACES_EXPORTER") != "none":
            processors.append(BatchSpanProcessor(OTLPSpanExporter()))
        if environment.get("OTEL_METRICS_EXPORTER") == "otlp":
            readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
        return cls(resource_of_process(), processors, readers)

    def request_tracer(self) -> RequestTracer:
        """Return what makes the spans of requests; `OTEL_TRACES_SAMPLER` says of which."""
        provider = TracerProvider(None if self._processors else ALWAYS_OFF, self._resource, shutdown_on_exit=False)
        for processor in self._processors:
            provider.add_span_processor(processor)
        metrics = None if self._meters is None else HttpMetrics(self._meters.get_meter(_SCOPE))
        # By default the SDK reads `baggage`, too, which nothing here needs, and logs what is malformed in it.
        chosen = "OTEL_PROPAGATORS" in os.environ
        propagator = get_global_textmap() if chosen else TraceContextTextMapPropagator()
        return RequestTracer(provider.get_tracer(_SCOPE), propagator, metrics)

    def batch_tracer(self) -> BatchTracer:
        """Return what makes the spans of batches."""
        return BatchTracer(self._resource, self._processors)

    def close(self, seconds: float = _LAST_EXPORT_SECONDS) -> None:
        """Export what is left, for at most so many seconds: a collector that hangs must not hold the process."""
        # The SDK has bounds of its own, but longer ones; its threads end with the process.
        endings: list[Callable[[], None]] = [processor.shutdown for processor in self._processors]
        if self._meters is not None:
            endings.append(self._meters.shutdown)
        threads = [threading.Thread(target=ending, name="telemetry", daemon=True) for ending in endings]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


def resource_of_process() -> Resource:
    """Return who exports: the service, as `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` say, and this process."""
    ours: dict[str, AttributeValue] = {
        "service.name": "vitserve",
        "service.version": __version__,
        "service.instance.id": str(uuid.uuid4()),  # two workers' metrics are two streams
        "process.pid": os.getpid(),
    }
    return Resource.create({**ours, **OTELResourceDetector().detect().attributes})


class RequestIds(logging.Filter):
    """Adds the ids of the request that a record belongs to, by the names of OpenTelemetry, to its fields.

    https://opentelemetry.io/docs/specs/otel/compatibility/logging_trace_context/
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record through."""
        context = get_current_span().get_span_context()
        if context.is_valid:
            record.fields = {
                **getattr(record, "fields", {}),
                "trace_id": format_trace_id(context.trace_id),
                "span_id": format_span_id(context.span_id),
                "trace_flags": f"{context.trace_flags:02x}",
            }
        return True


class Sparingly(logging.Filter):
    """Lets a record of a package through if the same text was not logged in the last minute.

    An exporter says with every batch that its collector does not answer.

    Args:
        package: whose loggers are limited; other loggers are not.
        clock: monotonic seconds.
    """

    def __init__(self, package: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._prefix = f"{package}."
        self._clock = clock
        self._last: dict[tuple[str, object], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is to be logged."""
        if not record.name.startswith(self._prefix):
            return True
        key, now = (record.name, record.msg), self._clock()
        if now - self._last.get(key, -_PAUSE_SECONDS) < _PAUSE_SECONDS:
            return False
        self._last[key] = now
        return True
