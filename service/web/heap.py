"""Gives memory that was freed back to the operating system, from time to time.

glibc returns freed memory by itself only from the end of a heap. A burst of uploads therefore leaves its peak resident:
most of it is free, below one small object that is not. `malloc_trim` returns whole pages from the middle, too.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

TRIM_SECONDS = 30.0
"""Seconds between two moments at which a process returns freed memory."""


def malloc_trim() -> Callable[[], object] | None:
    """Return the function that returns free pages of all heaps, or None where the C library has none (not glibc)."""
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if function is None else lambda: function(ctypes.c_size_t(0))


def trim_regularly(
    trim: Callable[[], object] | None = None,
    wait: Callable[[float], object] = time.sleep,
) -> threading.Thread | None:
    """Start a thread that trims the heap every `TRIM_SECONDS`, as long as the process lives.

    It releases the interpreter's lock meanwhile. A thread that allocates from the same heap waits some milliseconds.

    Args:
        trim: None for `malloc_trim`; where there is none, no thread is started.
        wait: waits that many seconds.

    Returns:
        The thread, or None.
    """
    trim = trim or malloc_trim()
    if trim is None:
        return None

    def run() -> None:
        while True:
            wait(TRIM_SECONDS)
            trim()

    thread = threading.Thread(target=run, name="trim-heap", daemon=True)
    thread.start()
    return thread
