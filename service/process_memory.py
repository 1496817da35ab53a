"""The memory of a process: garbage collection, heaps, and pages that it returns."""

import ctypes
import gc
import os
import time
from typing import Final

from model.cores import usable_cores
from service.background import supervised_thread

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
