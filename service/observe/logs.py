"""The service's log: lines for people, or a JSON object a line.

    a thread that logs -> a bounded queue -> the writer's thread -> standard error

A pipe without a reader, a stopped terminal and a stalled journal block whoever writes to them. So
only the writer's thread writes. Lines that find the queue full are dropped and counted.
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
"""The ids of the span of the current request, by OpenTelemetry's names; empty without a span."""


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object; a request's fields stand beside a short message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one record as a line of JSON."""
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

# Lines that wait for the writer: some MiB, and seconds of a busy service's log.
CAPACITY: Final = 10_000

# Longest wait, in seconds, for the last lines of a process that ends.
FLUSH_SECONDS: Final = 1.0


class LogWriter(QueueHandler):
    """Writes lines to a file descriptor on a thread of its own; logging a line never waits.

    The thread is started with the first line, and anew in a forked process.

    Args:
        descriptor: of the file that lines are written to.
        capacity: number of lines that may wait.

    Attributes:
        dropped: number of lines that this process has dropped.
        on_drop: called for each dropped line.
    """

    def __init__(self, descriptor: int = STANDARD_ERROR, capacity: int = CAPACITY) -> None:
        self._descriptor = descriptor
        self._capacity = capacity
        self.on_drop: Callable[[], object] | None = None
        super().__init__(queue.Queue(capacity))
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Forget the lines and the thread of the process that this one was forked from."""
        self._lines: queue.Queue[str | None] = queue.Queue(self._capacity)
        self.queue = self._lines
        self._thread: threading.Thread | None = None
        self.dropped = 0
        self._told = 0

    def prepare(self, record: logging.LogRecord) -> str:  # a line is all that is queued
        """Return the record as a line, with what the calling thread knows of it."""
        return self.format(record)

    def enqueue(self, record: object) -> None:
        """Hand a line to the writer, or drop it if the queue is full."""
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
        until = time.monotonic() + FLUSH_SECONDS
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks and self._thread is not None:
                remaining = until - time.monotonic()
                if remaining <= 0:
                    return
                self._lines.all_tasks_done.wait(remaining)

    def close(self) -> None:
        """Let the thread end once all lines are written; do not wait for it."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        super().close()

    def _write_lines(self) -> None:
        lines = self._lines
        while (line := lines.get()) is not None:
            try:
                _write(self._descriptor, line)
                if self.dropped > self._told:
                    self._tell_of_dropped()
            except (
                OSError
            ):  # the reader is gone, or the descriptor is closed: there is nobody to tell
                pass
            finally:
                lines.task_done()

    def _tell_of_dropped(self) -> None:
        """Write how many lines were dropped since the last such line."""
        dropped = self.dropped
        fields = {"dropped": dropped - self._told}
        text = "%(dropped)d log lines were dropped because nothing read the log"
        record = logging.LogRecord("vitserve", logging.WARNING, __file__, 0, text, (fields,), None)
        record.fields = fields
        _write(self._descriptor, self.format(record))
        self._told = dropped


def _write(descriptor: int, line: str) -> None:
    rest = memoryview(f"{line}\n".encode(errors="backslashreplace"))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _log_failed_thread(failure: threading.ExceptHookArgs) -> None:
    """Log what Python would write to standard error itself, where it would wait for a reader."""
    if failure.exc_type is SystemExit or failure.exc_value is None:
        return
    name = "" if failure.thread is None else failure.thread.name
    logging.getLogger("vitserve").error("thread %s failed", name, exc_info=failure.exc_value)


def _log_unraisable(failure: "sys.UnraisableHookArgs") -> None:
    """Log what Python would write to standard error itself, where it would wait for a reader."""
    logging.getLogger("vitserve").error(
        "%s: %r", failure.err_msg or "ignored exception", failure.object, exc_info=failure.exc_value
    )


class Printed(io.TextIOBase):
    """A standard stream whose lines are written as the log's are: nothing that prints waits for a
    reader.

    What Python itself prints goes through it too: errors that nobody caught, and the last words of
    `sys.exit`.
    """

    encoding = "utf-8"

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._rest = ""

    def write(self, text: str) -> int:
        """Hand all whole lines to the writer."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._hand_over(line)
        return len(text)

    def flush(self) -> None:
        """Hand over a line that has no end yet; do not wait until it is written."""
        if self._rest:
            self._hand_over(self._rest)
        self._rest = ""

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of standard error."""
        return STANDARD_ERROR

    def _hand_over(self, line: str) -> None:
        lock = self._writer.lock
        assert lock is not None, "a handler has one"
        with lock:
            self._writer.enqueue(line)


def never_wait() -> None:
    """Let what this process prints and dumps from now on not wait for a reader, as its log does
    not.

    A library in C that writes to the descriptor of standard error itself still does.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogWriter):
            sys.stdout = Printed(handler)
            sys.stderr = Printed(handler)
    if faulthandler.is_enabled():
        with contextlib.suppress(OSError):  # a socket cannot be opened once more
            # Not to wait is a property of what is opened, which other processes may share.
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


def on_drop(called: Callable[[], object]) -> None:
    """Call a function for each line that this process drops from now on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogWriter):
            handler.on_drop = called


def configure(log_format: str, level: str, *, waits: bool = False) -> None:
    """Send all messages to standard error in one form, those of uvicorn and of `warnings` included.

    Args:
        log_format: `json` or `text`.
        level: the lowest that is logged.
        waits: whether to wait for a slow reader, as a command does that a person watches.
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
    # logging would look these up for each record, and no format shows them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # What is wrong with a form is in the answer, and in our line about the request.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    # Their messages at start-up repeat ours.
    for name in ("uvicorn", "uvicorn.error", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
