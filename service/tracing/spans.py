"""The spans of requests and of batches.

    POST /classify                  server, a child of the caller's span
      read                          internal, one for each stage that metrics measure
      decode                        from here on one for each picture
      queue
      inference  - - link - - >  batch

A stage's span is made when the stage is over, from the seconds that were measured. A batch belongs to many requests:
its span is in a trace of its own, with links to each of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from opentelemetry.context import Context, attach, detach
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.semconv.attributes.http_attributes import HTTP_RESPONSE_STATUS_CODE, HTTP_ROUTE
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    format_span_id,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)

from service.engine.messages import BatchReport, InferenceResult
from service.tracing.http import HttpMetrics, method_of, request_attributes, span_name

Headers = Iterable[tuple[bytes, bytes]]

CLIENT_DISCONNECTED = "client_disconnected"
"""Type of the error of a request whose caller went away."""


class RequestTracer:
    """Makes the spans of requests; belongs to one event loop.

    Args:
        propagator: reads the caller's span from headers.
        metrics: measures requests for OTLP; None without OTLP.
        wall_clock: nanoseconds since 1970.
    """

    def __init__(
        self,
        tracer: Tracer,
        propagator: TextMapPropagator,
        metrics: HttpMetrics | None = None,
        *,
        wall_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.tracer = tracer
        self.metrics = metrics
        self.wall_clock = wall_clock
        self._propagator = propagator

    def begin(self, scope: Mapping[str, Any]) -> RequestTrace:
        """Return the trace of a request, of an ASGI scope; its span is the current one until `RequestTrace.end`."""
        return RequestTrace(self, scope, self._propagator)

    def traceparent(self) -> str | None:
        """Return the context of the current request's span; None if it is not sampled."""
        context = get_current_span().get_span_context()
        return traceparent_of(context) if context.trace_flags.sampled else None

    def stage(self, name: str, seconds: float) -> None:
        """Export the span of a stage of the current request that has just ended, after some seconds."""
        if get_current_span().is_recording():
            end = self.wall_clock()
            self.tracer.start_span(name, start_time=end - _nanoseconds(seconds)).end(end)

    def computed(self, result: InferenceResult) -> None:
        """Export the spans of an image of the current request that has just been computed: `queue` and `inference`."""
        if not get_current_span().is_recording():
            return
        end = self.wall_clock()
        launched = end - _nanoseconds(result.inference_seconds)
        self.tracer.start_span("queue", start_time=launched - _nanoseconds(result.queue_seconds)).end(launched)
        links = () if result.batch_traceparent is None else (Link(context_of(result.batch_traceparent)),)
        attributes = {"vitserve.batch.size": result.batch_size}
        self.tracer.start_span("inference", start_time=launched, links=links, attributes=attributes).end(end)

    def failed(self, name: str, seconds: float, error: Exception) -> None:
        """Export the span of a stage in which the current request, or one of its images, failed after some seconds."""
        if not get_current_span().is_recording():
            return
        end = self.wall_clock()
        attributes = {ERROR_TYPE: type(error).__name__}
        span = self.tracer.start_span(name, start_time=end - _nanoseconds(seconds), attributes=attributes)
        span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end(end)


class RequestTrace:
    """The span of one request, which is the current one from here on, in this task and those that it starts.

    Attributes:
        error_type: of its failure, if it fails; by default the status of its answer.
        exemplar: the ids that a sample of its metrics may carry; None if it is not sampled.
        response_header: for the answer, so that its caller finds the trace.
    """

    def __init__(self, tracer: RequestTracer, scope: Mapping[str, Any], propagator: TextMapPropagator) -> None:
        self.error_type: str | None = None
        self._metrics = tracer.metrics
        self._method = method_of(scope)
        self._attributes = request_attributes(scope)
        parent = propagator.extract(_by_name(scope["headers"]), Context())
        self._span = tracer.tracer.start_span(
            span_name(self._method, None), parent, SpanKind.SERVER, attributes=self._attributes
        )
        context = self._span.get_span_context()
        self.exemplar: dict[str, str] | None = None
        if context.trace_flags.sampled:
            self.exemplar = {
                "trace_id": format_trace_id(context.trace_id),
                "span_id": format_span_id(context.span_id),
            }
        self.response_header = (b"traceresponse", traceparent_of(context).encode())
        self._token = attach(set_span_in_context(self._span, parent))
        if self._metrics is not None:
            self._metrics.begin(self._attributes)

    def crashed(self, error: Exception) -> None:
        """Add a defect of ours, with its traceback, to the span."""
        self._span.record_exception(error)

    def end(
        self, status: int | None, route: str | None, seconds: float, *, request_id: str, key_name: str | None
    ) -> None:
        """Export the span.

        Args:
            status: of the answer; None if the caller went away before.
            route: path of the route that answered; None if there is none.
            seconds: from the request's head to the end of its answer.
            key_name: of the API key; None without a key.
        """
        answer: dict[str, str | int] = {}
        if route is not None:
            answer[HTTP_ROUTE] = route
            self._span.update_name(span_name(self._method, route))
        if status is not None:
            answer[HTTP_RESPONSE_STATUS_CODE] = status
        if status is None or status >= HTTPStatus.INTERNAL_SERVER_ERROR:  # what the caller did wrong is no error here
            answer[ERROR_TYPE] = CLIENT_DISCONNECTED if status is None else self.error_type or str(status)
            self._span.set_status(StatusCode.ERROR)
        self._span.set_attributes({**answer, "vitserve.request_id": request_id})
        if key_name is not None:
            self._span.set_attribute("vitserve.api_key.name", key_name)
        self._span.end()
        if self._metrics is not None:
            self._metrics.end(self._attributes, answer, seconds)
        detach(self._token)


def _by_name(headers: Headers) -> dict[str, list[str]]:
    """Return the values of an ASGI scope's headers, by their names."""
    values: dict[str, list[str]] = {}
    for name, value in headers:
        values.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    return values


class BatchTracer:
    """Makes the span of each batch that has an image of a sampled request, whatever the sampler says of new traces.

    Belongs to one thread: that of the event loop on which batches are reported.

    Args:
        wall_clock: nanoseconds since 1970.
    """

    def __init__(
        self,
        resource: Resource,
        processors: Sequence[SpanProcessor],
        *,
        wall_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._ids = _GivenIds()
        provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids)
        for processor in processors:
            provider.add_span_processor(processor)
        self._tracer = provider.get_tracer("vitserve")
        self._wall_clock = wall_clock

    def observe(self, report: BatchReport) -> None:
        """Export the span of a launch that has just ended; nothing if no request that is in it was sampled."""
        if report.traceparent is None:
            return
        end = self._wall_clock()
        self._ids.context = context_of(report.traceparent)
        span = self._tracer.start_span(
            "batch",
            Context(),  # no parent
            start_time=end - _nanoseconds(report.inference_seconds),
            links=[Link(context_of(link)) for link in report.links],
            attributes={
                "vitserve.device": report.device,
                "vitserve.batch.size": report.size,
                "vitserve.batch.padding": report.padding,
                "vitserve.batch.release": report.release,
            },
        )
        span.end(end)


class _GivenIds(IdGenerator):
    """Gives a span the ids that the answers of its batch have named already."""

    context: SpanContext

    def generate_trace_id(self) -> int:
        return self.context.trace_id

    def generate_span_id(self) -> int:
        return self.context.span_id


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1_000_000_000)


def traceparent_of(context: SpanContext) -> str:
    """Return a span's context as `00-TRACE-SPAN-FLAGS`, the form of W3C Trace Context in which engines hand it on.

    https://www.w3.org/TR/trace-context/#traceparent-header
    """
    return f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{context.trace_flags:02x}"


def context_of(traceparent: str) -> SpanContext:
    """Return the context that `traceparent_of` wrote."""
    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
