"""Spans of requests and batches, and HTTP metrics, by OpenTelemetry; `start` imports its packages only when asked."""
