"""The span of a batch: in a trace of its own, as it belongs to many requests, with links to each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, SpanContext, TraceFlags, format_span_id, format_trace_id

from service.engine.messages import BatchReport

NANOSECONDS = 1_000_000_000


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
            start_time=end - int(report.inference_seconds * NANOSECONDS),
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


def traceparent_of(context: SpanContext) -> str:
    """Return a span's context as `00-TRACE-SPAN-FLAGS`, the form of W3C Trace Context in which engines hand it on.

    https://www.w3.org/TR/trace-context/#traceparent-header
    """
    return f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{context.trace_flags:02x}"


def context_of(traceparent: str) -> SpanContext:
    """Return the context that `traceparent_of` wrote."""
    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
