"""The C library's heap, told to keep the memory that a pass frees for the next pass.

glibc gives freed memory back to the operating system at once when it is at the end of a heap or was a large block, and
takes it again for the next pass: the kernel then clears thousands of pages for each batch. Networks of a few
milliseconds an image spend an eighth of their time so.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Parameters of `mallopt`: see mallopt(3)."""

_TUNABLES: Final = ("glibc.malloc.trim_threshold", "glibc.malloc.mmap_threshold")
_VARIABLES: Final = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}

_LARGEST_IN_HEAP: Final = 32 << 20
"""Bytes of a block that is not mapped by itself: the most that glibc takes, and what it comes to without this, too,
once a block of that size was freed."""

_KEPT: Final = 2 * _LARGEST_IN_HEAP
"""Bytes at the end of a heap that stay with the process; twice the largest block is glibc's own rule."""


def keep_freed_memory() -> bool:
    """Let each heap of this process keep up to 64 MiB that it freed; return whether that was done.

    Each thread that computes has a heap. `malloc_trim` gives back what the first thread's keeps, not the others'. A C
    library that is not glibc is left as it is, and so is glibc where the environment sets its thresholds.
    """
    if any(name in os.environ.get("GLIBC_TUNABLES", "") for name in _TUNABLES) or not _VARIABLES.isdisjoint(os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP) and mallopt(_TRIM_THRESHOLD, _KEPT))
