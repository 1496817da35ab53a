"""Span contexts as text of W3C Trace Context, the form in which engines hand them on.

https://www.w3.org/TR/trace-context/#traceparent-header
"""

from __future__ import annotations

from opentelemetry.trace import SpanContext, TraceFlags, format_span_id, format_trace_id


def traceparent_of(context: SpanContext) -> str:
    """Return a span's context as `00-TRACE-SPAN-FLAGS`."""
    return f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{context.trace_flags:02x}"


def context_of(traceparent: str) -> SpanContext:
    """Return the context that `traceparent_of` wrote."""
    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
