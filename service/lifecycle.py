"""The life of a process: its state, the signals that stop it, its end, and the memory that it gives
back.
"""

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
"""Seconds between two moments at which a process returns freed memory."""

# A parameter of `mallopt`: see mallopt(3).
_ARENA_MAX: Final = -8

NEW_OBJECTS: Final = 50_000
"""New objects after which the garbage collector looks at them; a request in the service has about a
hundred.

Python's own 700 let it run whenever a batch of answers made room for a batch of requests. With
2,048 callers it took a third of the event loop's time, in which it found nothing: no request leaves
a circle that holds a picture.
"""


class Lifecycle:
    """The state of a process.

    Attributes:
        stopping: it was asked to end: it is not ready, but serves, so that load balancers have time
        to look away.
        draining: it takes no new work either.
        answered, refused: counts of requests since it was asked to end.
    """

    def __init__(self) -> None:
        self.stopping = self.draining = False
        self.answered = self.refused = 0
        self.exit_code = 0


def freeze_objects() -> None:
    """Exempt long-lived objects, those of start-up and of a model that took over, from garbage
    collection.

    To traverse them in each collection would cost requests a few hundredths of their time. From
    then on the objects of requests are collected seldom, see `NEW_OBJECTS`.
    """
    gc.set_threshold(NEW_OBJECTS)
    gc.unfreeze()  # objects that were exempt may be no longer in use
    gc.collect()
    gc.freeze()


def bound_heaps() -> None:
    """Let glibc, if it is that, make as many heaps as there are cores, where it makes eight times
    as many.

    Threads come and go with models, and allocate in one heap or another. What little a process
    keeps of an unloaded model lies scattered over all of them, a page each. After three models of
    170 MiB had come and gone three times, a process of 327 MiB had 385, and with two heaps one of
    312 has 338. Call it before there are threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"}.intersection(os.environ):
        mallopt(_ARENA_MAX, max(2, usable_cores()))


def release_memory() -> None:
    """Return the memory of a model that is closed to the operating system; see `freeze_objects`."""
    freeze_objects()
    _trim()


def trim_regularly() -> None:
    """Start a thread that returns freed memory to the operating system every `_TRIM_SECONDS`, where
    glibc can.

    glibc returns freed memory by itself only from the end of a heap. A burst of uploads therefore
    leaves its peak resident: most of it is free, below a small object that is not. `malloc_trim`
    returns whole pages from the middle, too, without the interpreter's lock; it delays allocations
    from the same heap by milliseconds.
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
    """Return the signals that drain the service; SIGHUP only if it is not ignored, as it is under
    nohup.
    """
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hang_up)


def log_end(answered: int, refused: int) -> None:
    """Log, as the last line of a service, how many requests were answered and refused since it was
    asked to end.
    """
    fields = {"answered": answered, "refused": refused}
    text = "stopped: since the signal %(answered)d requests were answered and %(refused)d refused"
    logger.info(text, fields, extra={"fields": fields})


def exit_now(code: int) -> NoReturn:
    """End the process without waiting for its threads, which may be inside a decoder or a kernel."""
    logging.shutdown()
    os._exit(code)


class Terminal:
    """The terminal that this process was started in, if any."""

    def __init__(self, descriptors: Sequence[int] = (0, 1, 2)) -> None:
        self._descriptors = [descriptor for descriptor in descriptors if os.isatty(descriptor)]

    def hang_up(self, reload: Callable[[], None]) -> bool:
        """Reload on SIGHUP, and return whether that was done: not where a terminal sent it that was
        closed.
        """
        closed = bool(self._descriptors) and not any(map(os.isatty, self._descriptors))
        if not closed:
            reload()
        return not closed
