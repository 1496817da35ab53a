"""The service's log: lines for people, or a JSON object a line."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

trace_ids: ContextVar[Mapping[str, str]] = ContextVar("trace_ids", default=MappingProxyType({}))
"""The ids of the span of the current request, by OpenTelemetry's names; empty without a span."""


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object; a request's fields stand beside a short message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one record as a line of JSON."""
        document = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": getattr(record, "summary", None) or record.getMessage(),
            **getattr(record, "fields", {}),
            **trace_ids.get(),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)


def configure(log_format: str, level: str) -> None:
    """Send all messages to standard error in one form, uvicorn's included."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    # logging would look these up for each record, and no format shows them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # What is wrong with a form is in the answer, and in our line about the request.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    # Their messages at start-up repeat ours.
    for name in ("uvicorn", "uvicorn.error", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
