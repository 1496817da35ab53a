"""The service's log: lines for people, or one JSON object per line.

    a thread that logs -> a bounded queue -> the writer's thread -> standard error

A pipe without a reader, a stopped terminal and a stalled journal block the thread that writes.
Therefore only the writer's thread writes. If the queue is full, lines are dropped and counted.
"""

import contextlib
import faulthandler
import io
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from logging.handlers import QueueHandler
from types import MappingProxyType
from typing import Final

from service.background import supervised_thread

trace_ids: ContextVar[Mapping[str, str]] = ContextVar("trace_ids", default=MappingProxyType({}))
"""Ids of the current request's span, by their names in log lines; empty without a span."""


def shortened(text: str, limit: int) -> str:
    """Return the text, or its start and end if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = (limit - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: a short message, and a field for each value."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line of JSON."""
        document = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": getattr(record, "summary", None) or record.getMessage(),
            **getattr(record, "fields", {}),
            **trace_ids.get(),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)


STANDARD_ERROR: Final = 2

# Capacity of the writer's queue in lines: some MiB, and seconds of a busy service's log.
CAPACITY: Final = 10_000

# Longest wait for the last lines of an ending process.
FLUSH_SECONDS: Final = 1.0


class LogWriter(QueueHandler):
    """Writes lines to a file descriptor on its own thread; logging a line never waits.

    The thread starts with the first line, and again in a forked process.

    Args:
        descriptor: descriptor of the log file.
        capacity: largest number of queued lines.

    Attributes:
        dropped: number of lines that this process has dropped.
        on_drop: function to call for each dropped line.
    """

    def __init__(self, descriptor: int = STANDARD_ERROR, capacity: int = CAPACITY) -> None:
        self._descriptor = descriptor
        self._capacity = capacity
        self.on_drop: Callable[[], object] | None = None
        super().__init__(queue.Queue(capacity))
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Start with an empty queue and no thread, also after a fork."""
        self._lines: queue.Queue[str | None] = queue.Queue(self._capacity)
        self.queue = self._lines
        self._thread: threading.Thread | None = None
        self.dropped = 0
        self._reported = 0

    def prepare(self, record: logging.LogRecord) -> str:
        """Return the record as a line; the calling thread's context adds the trace ids."""
        return self.format(record)

    def enqueue(self, record: object) -> None:
        """Queue a line for the writer, or drop it if the queue is full."""
        if self._thread is None:  # the handler's lock is held
            self._thread = supervised_thread("log-writer", self._write_lines)
            self._thread.start()
        try:
            self._lines.put_nowait(str(record))
        except queue.Full:
            self.dropped += 1
            if self.on_drop is not None:
                self.on_drop()

    def flush(self) -> None:
        """Wait until all lines are written, at most `FLUSH_SECONDS`."""
        deadline = time.monotonic() + FLUSH_SECONDS
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks and self._thread is not None:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return
                self._lines.all_tasks_done.wait(remaining)

    def close(self) -> None:
        """Stop the thread after the last line; do not wait for it."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        super().close()

    def _write_lines(self) -> None:
        lines = self._lines
        while (line := lines.get()) is not None:
            try:
                _write(self._descriptor, line)
                if self.dropped > self._reported:
                    self._report_dropped()
            except OSError:  # the reader has ended, or the descriptor is closed
                pass
            finally:
                lines.task_done()

    def _report_dropped(self) -> None:
        """Write the number of dropped lines since the last such line."""
        dropped = self.dropped
        fields = {"dropped": dropped - self._reported}
        text = "%(dropped)d log lines were dropped because nothing read the log"
        record = logging.LogRecord("vitserve", logging.WARNING, __file__, 0, text, (fields,), None)
        record.fields = fields
        _write(self._descriptor, self.format(record))
        self._reported = dropped


def _write(descriptor: int, line: str) -> None:
    rest = memoryview(f"{line}\n".encode(errors="backslashreplace"))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _log_failed_thread(failure: threading.ExceptHookArgs) -> None:
    """Log the error of a thread; Python's own output could block on standard error."""
    if failure.exc_type is SystemExit or failure.exc_value is None:
        return
    name = "" if failure.thread is None else failure.thread.name
    logging.getLogger("vitserve").error("thread %s failed", name, exc_info=failure.exc_value)


def _log_unraisable(failure: "sys.UnraisableHookArgs") -> None:
    """Log an unraisable error; Python's own output could block on standard error."""
    logging.getLogger("vitserve").error(
        "%s: %r", failure.err_msg or "ignored exception", failure.object, exc_info=failure.exc_value
    )


class Printed(io.TextIOBase):
    """A standard stream that queues its lines in the log, so that printing never waits.

    Python's own output goes through it, too: uncaught errors, and the message of `sys.exit`.
    """

    encoding = "utf-8"

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._rest = ""

    def write(self, text: str) -> int:
        """Queue all complete lines."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._enqueue(line)
        return len(text)

    def flush(self) -> None:
        """Queue an incomplete line; do not wait until it is written."""
        if self._rest:
            self._enqueue(self._rest)
        self._rest = ""

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of standard error."""
        return STANDARD_ERROR

    def _enqueue(self, line: str) -> None:
        lock = self._writer.lock
        assert lock is not None, "a handler has one"
        with lock:
            self._writer.enqueue(line)


def never_wait() -> None:
    """Make printing and dumps of this process never wait for a reader, like its log.

    A C library that writes to the descriptor of standard error still waits.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogWriter):
            sys.stdout = Printed(handler)
            sys.stderr = Printed(handler)
    if faulthandler.is_enabled():
        with contextlib.suppress(OSError):  # a socket cannot be reopened
            # Reopen: other processes may share the open file, and O_NONBLOCK belongs to it.
            faulthandler.enable(
                os.open(
                    f"/proc/self/fd/{STANDARD_ERROR}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK
                )
            )


def format_in_use() -> str:
    """Return the log format of this process, `json` or `text`; see `configure`."""
    is_json = any(
        isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers
    )
    return "json" if is_json else "text"


def on_drop(observer: Callable[[], object]) -> None:
    """Call a function for each line that this process drops from now on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogWriter):
            handler.on_drop = observer


def configure(log_format: str, level: str, *, waits: bool = False) -> None:
    """Send all messages, of uvicorn and `warnings` too, to standard error in one format.

    Args:
        log_format: `json` or `text`.
        level: lowest logged level.
        waits: whether logging may wait for a slow reader. A command that a person watches may.
    """
    handler = logging.StreamHandler(sys.stderr) if waits else LogWriter()
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
        )
    if not waits:
        logging.captureWarnings(True)
        threading.excepthook = _log_failed_thread
        sys.unraisablehook = _log_unraisable
    # logging would look these up for each record, but neither format shows them.
    logging.logThreads = False
    logging.logProcesses = False
    logging.logMultiprocessing = False
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # The answer and our log line already report the errors of a form.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    # Their messages at start-up repeat ours.
    for name in ("uvicorn", "uvicorn.error", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
