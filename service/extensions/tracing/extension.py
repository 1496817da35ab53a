"""Adds spans of requests for OpenTelemetry, if its variables (`OTEL_...`) ask for them."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from service.errors import SettingsError
from service.extension import Extension

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp

    from service.settings import Settings
    from service.web.routes.endpoint import Application

_EXPORTERS = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
}
"""Variables of OpenTelemetry that choose an exporter, and the supported value."""


def exports_spans() -> bool:
    """Return whether OpenTelemetry's variables ask for spans and the extra `otel` is installed.

    Raises:
        SettingsError: the variables ask for an unsupported exporter.
    """
    environment = os.environ
    exporter = environment.get("OTEL_TRACES_EXPORTER")
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    is_wanted = exporter or any(environment.get(name) for name in endpoints)
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if not is_wanted or is_disabled or exporter == "none":
        return False
    from service.setting_values import is_installed

    if not is_installed("opentelemetry.instrumentation.asgi"):
        return False
    for name in endpoints:
        if environment.get(name) and "://" not in environment[name]:
            raise SettingsError(
                f"{name}={environment[name]!r}: expected a URL such as http://localhost:4318"
            )
    for name, supported in _EXPORTERS.items():
        if environment.get(name, "") not in ("", supported):
            raise SettingsError(f"{name}={environment[name]!r}: expected {supported}")
    return True


def _check(_: Settings) -> None:
    exports_spans()


def _around(inner: ASGIApp, app: Application) -> ASGIApp:
    if not exports_spans():
        return inner
    from service.extensions.tracing.spans import Tracing  # needs the extra `otel`

    app.state.tracing = Tracing()
    return app.state.tracing.around(inner, app.state.rules.probes)  # type: ignore[no-any-return]


@asynccontextmanager
async def _beside(app: Application) -> AsyncIterator[None]:
    yield
    tracing = getattr(app.state, "tracing", None)
    if tracing is not None:
        await tracing.close()


EXTENSION = Extension(name="tracing", check=_check, around=_around, beside=_beside)
