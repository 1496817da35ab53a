"""Spans of requests by OpenTelemetry, with a child for each stage of each image.

    POST /classify      server span, a child of the client's span
      read              one span per stage, like the metrics
      decode            from here on, one span per image and stage
      queue
      inference         the image's batch, with its size

This module needs the extra `otel`, and is imported only if spans are exported (`exports_spans`).
The SDK reads the variables `OTEL_...`.
"""

import asyncio
import os
import re
import threading
import time
from collections.abc import Collection
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
from opentelemetry.instrumentation.propagators import (
    TraceResponsePropagator,
    set_global_response_propagator,
)
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import format_span_id, format_trace_id, get_current_span
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import SettingsError
from service.observe.logs import trace_ids
from service.observe.metrics import stage_recorder
from vitserve import __version__

_SECRETS: Final = re.compile(rb"(?<![^&])id=[^&]*")
"""Query parameters that give access to a picture."""

_ORIGINAL: Final = "vitserve.scope"
_LAST_EXPORT_SECONDS: Final = 3.0


class Tracing:
    """Exports the spans of one process; must be created after any fork.

    Args:
        processor: receives each completed span; by default, OpenTelemetry's variables configure it.

    Raises:
        SettingsError: one of these variables has an invalid value.
    """

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        set_global_response_propagator(TraceResponsePropagator())  # type: ignore[no-untyped-call]
        # Use the stable names of attributes.
        os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http")
        attributes: dict[str, str | int] = {
            "service.name": "vitserve",
            "service.version": __version__,
            "process.pid": os.getpid(),
        }
        try:
            resource = Resource.create(attributes).merge(OTELResourceDetector().detect())
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        except ValueError as error:
            raise SettingsError(f"OpenTelemetry's variables (OTEL_...): {error}") from None
        self._tracer = self._provider.get_tracer("vitserve", __version__)

    def around(self, app: ASGIApp, unobserved: Collection[str]) -> ASGIApp:
        """Return the application with a span around each request.

        The spans do not contain ids of kept pictures or addresses of clients.

        Args:
            app: the application.
            unobserved: paths without spans.
        """

        async def inner(scope: Scope, receive: Receive, send: Send) -> None:
            span = get_current_span()
            context = span.get_span_context()
            trace_ids.set(
                {
                    "trace_id": format_trace_id(context.trace_id),
                    "span_id": format_span_id(context.span_id),
                }
            )
            stage_recorder.set(self._record_stage if span.is_recording() else None)
            await app(scope[_ORIGINAL], receive, send)

        traced = OpenTelemetryMiddleware(
            inner,
            tracer_provider=self._provider,
            meter_provider=NoOpMeterProvider(),
            exclude_spans=["receive", "send"],
        )

        async def outer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] in unobserved:
                await app(scope, receive, send)
                return
            query = _SECRETS.sub(b"id=REDACTED", scope["query_string"])
            await traced(
                {**scope, "client": None, "query_string": query, _ORIGINAL: scope}, receive, send
            )

        return outer

    async def close(self, export_seconds: float = _LAST_EXPORT_SECONDS) -> None:
        """Export the last spans, for at most `export_seconds`: a collector may hang."""
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, export_seconds)

    def _record_stage(self, stage: str, seconds: float, batch_size: int | None) -> None:
        end = time.time_ns()
        attributes = {} if batch_size is None else {"vitserve.batch.size": batch_size}
        start = end - int(seconds * 1e9)
        self._tracer.start_span(stage, start_time=start, attributes=attributes).end(end)
