"""Spans of requests and batches, and HTTP metrics. `start` imports OpenTelemetry only with `VIT_OTEL`."""
