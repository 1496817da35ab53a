"""Spans of requests by OpenTelemetry, with a child for each stage of each image.

    POST /classify      server, a child of the caller's span
      read              one for each stage that metrics measure
      decode            from here on one for each image
      queue
      inference         of the image's batch, with its size

It needs the extra `otel`, and is imported only where spans are exported
(`service.settings.exports_spans`). The variables `OTEL_...` are read by the SDK.
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
"""Parameters that give access to a picture."""

_ORIGINAL: Final = "vitserve.scope"
_LAST_EXPORT_SECONDS: Final = 3.0


class Tracing:
    """Exports the spans of one process; made in the process that uses it, never before a fork.

    Args:
        processor: takes each span that ends; by default it sends them as OpenTelemetry's variables
        say.

    Raises:
        SettingsError: one of these variables has a wrong value.
    """

    def __init__(self, processor: SpanProcessor | None = None) -> None:
        set_global_response_propagator(TraceResponsePropagator())  # type: ignore[no-untyped-call]
        os.environ.setdefault(
            "OTEL_SEMCONV_STABILITY_OPT_IN", "http"
        )  # the stable names of attributes
        own: dict[str, str | int] = {
            "service.name": "vitserve",
            "service.version": __version__,
            "process.pid": os.getpid(),
        }
        try:
            resource = Resource.create(own).merge(OTELResourceDetector().detect())
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        except ValueError as error:
            raise SettingsError(f"OpenTelemetry's variables (OTEL_...): {error}") from None
        self._tracer = self._provider.get_tracer("vitserve", __version__)

    def around(self, app: ASGIApp, unobserved: Collection[str]) -> ASGIApp:
        """Return the application with a span around each request, except those of the unobserved
        paths.

        Ids of kept pictures and addresses of callers are not exported.
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

    async def close(self) -> None:
        """Export what is left, for at most 3 s: a collector may hang."""
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _LAST_EXPORT_SECONDS)

    def _record_stage(self, stage: str, seconds: float, batch_size: int | None) -> None:
        end = time.time_ns()
        attributes = {} if batch_size is None else {"vitserve.batch.size": batch_size}
        self._tracer.start_span(
            stage, start_time=end - int(seconds * 1e9), attributes=attributes
        ).end(end)
