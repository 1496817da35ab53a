"""Attributes and metrics of requests by the semantic conventions for HTTP. Prometheus has metrics of its own.

https://opentelemetry.io/docs/specs/semconv/http/http-spans/#http-server-span
https://opentelemetry.io/docs/specs/semconv/http/http-metrics/#http-server
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from opentelemetry.metrics import Meter
from opentelemetry.semconv.attributes import (
    http_attributes,
    network_attributes,
    server_attributes,
    url_attributes,
    user_agent_attributes,
)
from opentelemetry.semconv.metrics import http_metrics

_METHODS: Final = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"})
_OTHER: Final = "_OTHER"
_LONGEST: Final = 500
"""Characters of an attribute whose text comes from the caller."""

_HOST: Final = re.compile(r"(\[[^\]]*\]|[^:]+)(?::(\d{1,5}))?")
_SECRETS: Final = re.compile(r"(?<![^&])(id)=[^&]*")
"""Parameters that give access to a picture."""

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""The conventions' buckets."""

_ACTIVE: Final = (http_attributes.HTTP_REQUEST_METHOD, url_attributes.URL_SCHEME)
_OF_REQUEST: Final = (*_ACTIVE, network_attributes.NETWORK_PROTOCOL_VERSION)

Attributes = Mapping[str, str | int]


def method_of(scope: Mapping[str, Any]) -> str:
    """Return a request's method, `_OTHER` if it is none that is known, so that there are few of them."""
    method: str = scope["method"]
    return method if method in _METHODS else _OTHER


def span_name(method: str, route: str | None) -> str:
    """Return the name of a request's span."""
    name = "HTTP" if method == _OTHER else method
    return name if route is None else f"{name} {route}"


def request_attributes(scope: Mapping[str, Any]) -> dict[str, str | int]:
    """Return what a request's head says, of an ASGI scope; never the caller's address, or a key."""
    method = method_of(scope)
    attributes: dict[str, str | int] = {
        http_attributes.HTTP_REQUEST_METHOD: method,
        url_attributes.URL_SCHEME: scope["scheme"],
        url_attributes.URL_PATH: scope["path"][:_LONGEST],
        network_attributes.NETWORK_PROTOCOL_VERSION: scope["http_version"],
    }
    if method == _OTHER:
        attributes[http_attributes.HTTP_REQUEST_METHOD_ORIGINAL] = scope["method"][:_LONGEST]
    if query := scope["query_string"].decode("latin-1"):
        attributes[url_attributes.URL_QUERY] = _SECRETS.sub(r"\1=REDACTED", query)[:_LONGEST]
    if agent := header(scope["headers"], b"user-agent"):
        attributes[user_agent_attributes.USER_AGENT_ORIGINAL] = agent[:_LONGEST]
    if host := _HOST.fullmatch(header(scope["headers"], b"host")[:_LONGEST]):
        attributes[server_attributes.SERVER_ADDRESS] = host[1].strip("[]")
        if host[2]:
            attributes[server_attributes.SERVER_PORT] = int(host[2])
    return attributes


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str:
    """Return the first header of this name, in lower case, or an empty text."""
    return next((value.decode("latin-1") for key, value in headers if key == name), "")


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
