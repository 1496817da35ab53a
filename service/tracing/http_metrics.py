"""The metrics of an HTTP server by the semantic conventions, exported by OTLP; Prometheus has its own.

https://opentelemetry.io/docs/specs/semconv/http/http-metrics/#http-server
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opentelemetry.metrics import Meter
from opentelemetry.semconv.attributes import http_attributes, network_attributes, url_attributes
from opentelemetry.semconv.metrics import http_metrics

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""The conventions' buckets."""

_ACTIVE: Final = (http_attributes.HTTP_REQUEST_METHOD, url_attributes.URL_SCHEME)
_OF_REQUEST: Final = (*_ACTIVE, network_attributes.NETWORK_PROTOCOL_VERSION)

Attributes = Mapping[str, str | int]


class HttpMetrics:
    """Counts requests that are being handled, and measures them when they end."""

    def __init__(self, meter: Meter) -> None:
        self._duration = meter.create_histogram(
            http_metrics.HTTP_SERVER_REQUEST_DURATION,
            "s",
            "Duration of HTTP server requests.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._active = meter.create_up_down_counter(
            "http.server.active_requests", "{request}", "Number of active HTTP server requests."
        )

    def begin(self, request: Attributes) -> None:
        """Count a request, with the attributes of its head, that is being handled from now on."""
        self._active.add(1, _only(request, _ACTIVE))

    def end(self, request: Attributes, answer: Attributes, seconds: float) -> None:
        """Measure a request that has ended, with the attributes of its answer."""
        self._active.add(-1, _only(request, _ACTIVE))
        self._duration.record(seconds, {**_only(request, _OF_REQUEST), **answer})


def _only(attributes: Attributes, names: tuple[str, ...]) -> dict[str, str | int]:
    return {name: attributes[name] for name in names}
