"""Put logging back after a test: commands that run in its process set it up for good."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restored() -> Iterator[None]:
    """Restore the levels of all loggers, the root's handlers, what `logging` finds out for a line,
    streams and hooks.

    The next test in this process may be any one, and may count the lines. A handler that is left
    over would also write to a standard error that pytest has closed.
    """
    root = logging.getLogger()
    handlers = root.handlers[:]
    facts = (logging.logThreads, logging.logProcesses, logging.logMultiprocessing)
    streams = (sys.stdout, sys.stderr)
    hooks = (threading.excepthook, sys.unraisablehook)
    levels = {logger: logger.level for logger in _loggers()}
    try:
        yield
    finally:
        for logger in _loggers():
            if logger.level != levels.get(
                logger, logging.NOTSET
            ):  # setting a level clears all loggers' caches
                logger.setLevel(levels.get(logger, logging.NOTSET))
        root.handlers[:] = handlers
        sys.stdout, sys.stderr = streams
        threading.excepthook, sys.unraisablehook = hooks
        logging.captureWarnings(False)
        logging.logThreads, logging.logProcesses, logging.logMultiprocessing = facts


def _loggers() -> list[logging.Logger]:
    """The root and every logger that somebody has named."""
    known = list(logging.Logger.manager.loggerDict.values())
    named = [logger for logger in known if isinstance(logger, logging.Logger)]
    return [logging.getLogger(), *named]
