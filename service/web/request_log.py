"""The log line of each request, and a line for each second with many refusals."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from service.web.problems import shortened

# The name is in each line of JSON, where operators search for it.
logger = logging.getLogger("service.web.middleware")

LINES_A_SECOND = 10
"""Refusals that have a line of their own in each second."""

_MAX_PATH = 200
"""Characters of a request's path in its line."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that was answered, over HTTP or gRPC, with its status of HTTP and the seconds from its head on.

    What `details` returns stands in JSON alone.
    """

    method: str
    path: str
    status: int
    seconds: float
    request_id: str
    key_name: str | None = None
    details: Callable[[], dict[str, object]] = dict


class RequestLog:
    """Logs requests. Belongs to one event loop.

    Under a flood most requests are refused, and a line costs as much as the refusal itself. So only the first refusals
    of a second have their own lines. A line at its end counts the others, by reason.
    """

    def __init__(self) -> None:
        self._own_lines = 0
        self._more: Counter[str] = Counter()

    def answered(self, level: int, request: Answered) -> None:
        """Log a request that was answered."""
        if not logger.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "request_id": request.request_id,
            "method": request.method,
            "path": shortened(request.path, _MAX_PATH),
            "status": request.status,
            "duration_ms": round(1000 * request.seconds, 1),
        }
        line = "%(method)s %(path)s %(status)s %(duration_ms)s ms %(request_id)s"
        if request.key_name is not None:
            fields["key"] = request.key_name
            line += " %(key)s"
        logger.log(
            level,
            line,
            # Paths come from outside: no line break may start a log line of their own.
            {**fields, "path": fields["path"].encode("unicode_escape").decode("ascii")},
            extra={"fields": {**fields, **request.details()}, "summary": "request"},
        )

    def unparsed(self, status: int, detail: str, request_id: str) -> None:
        """Log bytes that were answered with a status, but never became a request."""
        fields = {"request_id": request_id, "status": status, "detail": detail}
        logger.info("no request: %(status)s %(detail)s %(request_id)s", fields, extra={"fields": fields})

    def has_own_line(self, reason: str) -> bool:
        """Return whether a request that is refused now has its own line; if not, count its problem code."""
        if not self._own_lines:
            asyncio.get_running_loop().call_later(1.0, self.end_second)
        if self._own_lines < LINES_A_SECOND:
            self._own_lines += 1
            return True
        self._more[reason] += 1
        return False

    def end_second(self) -> None:
        """Log how many more were refused since the last such line, if any were."""
        self._own_lines = 0
        if not self._more:
            return
        refused = dict(self._more)
        self._more.clear()
        reasons = ", ".join(f"{count} {reason}" for reason, count in refused.items())
        logger.info("refused %d more: %s", sum(refused.values()), reasons, extra={"fields": {"refused": refused}})
