"""Starts OpenTelemetry in a process if the settings ask for it; nothing of its packages is imported otherwise."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from service.engine.messages import BatchReport
from service.errors import SettingsError
from service.settings import Settings

if TYPE_CHECKING:
    from service.tracing.telemetry import Telemetry

_HTTP: Final = ("http/protobuf",)
_ALLOWED: Final = {
    "OTEL_TRACES_EXPORTER": ("otlp", "none"),
    "OTEL_METRICS_EXPORTER": ("otlp", "none"),
    "OTEL_EXPORTER_OTLP_PROTOCOL": _HTTP,
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": _HTTP,
    "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": _HTTP,
}
"""Variables that choose among exporters, and the values for which an exporter is installed."""


def check_environment(settings: Settings, environment: Mapping[str, str] = os.environ) -> None:
    """With `VIT_OTEL`, check the values of OpenTelemetry's variables that choose exporters.

    Raises:
        SettingsError: one line with the variable, its value and what is allowed.
    """
    if not settings.otel:
        return
    for name, allowed in _ALLOWED.items():
        value = environment.get(name)
        if value and value not in allowed:
            raise SettingsError(f"{name}={value!r}: expected {' or '.join(allowed)}")


def start_telemetry(settings: Settings, environment: Mapping[str, str] = os.environ) -> Telemetry | None:
    """Return what exports this process's spans, or None without `VIT_OTEL`. It starts threads of its own.

    Every record that is logged from now on has the ids of the request that it belongs to.

    Raises:
        SettingsError: one of OpenTelemetry's variables has a wrong value.
    """
    if not settings.otel or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    try:
        from service.tracing.telemetry import RequestIds, Sparingly, Telemetry  # noqa: PLC0415  optional packages

        telemetry = Telemetry.from_environment(environment)
    except ValueError as error:
        raise SettingsError(f"OpenTelemetry's variables (OTEL_...): {error}") from None
    for handler in logging.getLogger().handlers:
        handler.addFilter(RequestIds())
        handler.addFilter(Sparingly("opentelemetry"))
    return telemetry


def batch_observer(count: Callable[[BatchReport], None], telemetry: Telemetry | None) -> Callable[[BatchReport], None]:
    """Return the function that an engine's owner calls with each report: it counts, and makes the batch's span."""
    if telemetry is None:
        return count
    tracer = telemetry.batch_tracer()

    def observe(report: BatchReport) -> None:
        count(report)
        tracer.observe(report)

    return observe
