"""The life of a process: its state, its stop signals, its end, and the memory that it returns."""

import ctypes
import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from model.cores import usable_cores
from service.background import supervised_thread

logger = logging.getLogger("vitserve")

_TRIM_SECONDS: Final = 30.0
"""Interval at which a process returns freed memory to the system."""

# A parameter of `mallopt`: see mallopt(3).
_ARENA_MAX: Final = -8

NEW_OBJECTS: Final = 50_000
"""Threshold of the garbage collector, in new objects; a request creates about a hundred.

With Python's default of 700, the collector ran for each batch of requests. With 2,048 clients it
took a third of the event loop's time and freed nothing: no request leaves a reference cycle that
holds a picture.
"""


class Lifecycle:
    """The state of a process.

    Attributes:
        stopping: whether the process is to end. It is not ready, but still serves, so that load
            balancers have time to stop using it.
        draining: whether it also refuses new work.
        answered, refused: counts of requests since `stopping`.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.draining = False
        self.answered = 0
        self.refused = 0
        self.exit_code = 0


def freeze_objects() -> None:
    """Exempt all present objects from garbage collection: they live as long as the model.

    Traversing them in each collection would cost a few percent of each request's time. Later
    objects are collected seldom, see `NEW_OBJECTS`.
    """
    gc.set_threshold(NEW_OBJECTS)
    gc.unfreeze()  # some exempt objects may be garbage by now
    gc.collect()
    gc.freeze()


def bound_heaps() -> None:
    """Limit glibc to one heap per core instead of eight; call it before any thread starts.

    Threads come and go with models, and allocate from different heaps. The few objects that outlive
    a model keep single pages of all heaps resident. Three models of 170 MiB were loaded and
    unloaded three times. Memory grew from 327 to 385 MiB; with two heaps, from 312 to 338 MiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"}.intersection(os.environ):
        mallopt(_ARENA_MAX, max(2, usable_cores()))


def release_memory() -> None:
    """Return the memory of a closed model to the operating system; see `freeze_objects`."""
    freeze_objects()
    _trim()


def trim_regularly() -> None:
    """Start a thread that returns freed memory to the operating system, if glibc is in use.

    By itself, glibc returns freed memory only from the end of a heap. A burst of uploads therefore
    leaves its peak resident: most of it is free, but below a small object in use. `malloc_trim`
    also returns whole pages from the middle. It does not hold the interpreter's lock, and delays
    allocations from the same heap by milliseconds.
    """
    supervised_thread("trim-heap", _trim_forever).start()


def _trim_forever() -> None:
    while True:
        time.sleep(_TRIM_SECONDS)
        _trim()


def _trim() -> None:
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that drain the service; without SIGHUP if nohup has ignored it."""
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hang_up)


def log_end(answered: int, refused: int) -> None:
    """Log the last line of a service: the counts of requests since the stop signal."""
    fields = {"answered": answered, "refused": refused}
    text = "stopped: since the signal, %(answered)d requests were answered and %(refused)d refused"
    logger.info(text, fields, extra={"fields": fields})


def exit_now(code: int) -> NoReturn:
    """End the process at once; its threads may be inside a decoder or a kernel."""
    logging.shutdown()
    os._exit(code)


class Terminal:
    """The terminal that this process was started in, if any."""

    def __init__(self, descriptors: Sequence[int] = (0, 1, 2)) -> None:
        self._descriptors = [descriptor for descriptor in descriptors if os.isatty(descriptor)]

    def hang_up(self, reload: Callable[[], None]) -> bool:
        """Reload on SIGHUP, unless a closed terminal sent it; return whether it reloaded."""
        closed = bool(self._descriptors) and not any(map(os.isatty, self._descriptors))
        if not closed:
            reload()
        return not closed
