"""What OpenTelemetry changes about the log: ids of the request in each record, and its own complaints in moderation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from opentelemetry.trace import format_span_id, format_trace_id, get_current_span

_PAUSE_SECONDS: Final = 60.0


class RequestIds(logging.Filter):
    """Adds the ids of the request that a record belongs to, by the names of OpenTelemetry, to its fields.

    https://opentelemetry.io/docs/specs/otel/compatibility/logging_trace_context/
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record through."""
        context = get_current_span().get_span_context()
        if context.is_valid:
            record.fields = {
                **getattr(record, "fields", {}),
                "trace_id": format_trace_id(context.trace_id),
                "span_id": format_span_id(context.span_id),
                "trace_flags": f"{context.trace_flags:02x}",
            }
        return True


class Sparingly(logging.Filter):
    """Lets a record of a package through if the same text was not logged in the last minute.

    An exporter says with every batch that its collector does not answer.

    Args:
        package: whose loggers are meant; those of others may say what they want.
        clock: monotonic seconds.
    """

    def __init__(self, package: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._prefix = f"{package}."
        self._clock = clock
        self._last: dict[tuple[str, object], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is to be logged."""
        if not record.name.startswith(self._prefix):
            return True
        key, now = (record.name, record.msg), self._clock()
        if now - self._last.get(key, -_PAUSE_SECONDS) < _PAUSE_SECONDS:
            return False
        self._last[key] = now
        return True
