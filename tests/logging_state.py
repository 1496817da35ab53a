"""Restore logging after a test, because commands change it permanently in the test's process."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restored() -> Iterator[None]:
    """Restore levels, the root's handlers, the fields of records, streams and hooks.

    A later test may count log lines. A leftover handler would also write to a standard error that
    pytest has closed.
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
    """Return the root logger and every named logger."""
    known = list(logging.Logger.manager.loggerDict.values())
    named = [logger for logger in known if isinstance(logger, logging.Logger)]
    return [logging.getLogger(), *named]
