"""What backends on a CPU have in common: threads, sizes of batches, memory of the heap, native
dtypes.
"""

import ctypes
import os
import re
from pathlib import Path
from typing import Final

from model.config import LARGEST_LAYER

# Parameters of `mallopt`: see mallopt(3).
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3

# Bytes of a block that is not mapped by itself: the most that glibc takes, and what it comes to
# without this, too, once a block of that size was freed.
_LARGEST_IN_HEAP: Final = 32 << 20

# Bytes at the end of a heap that stay with the process; twice the largest block is glibc's own
# rule.
_KEPT: Final = 2 * _LARGEST_IN_HEAP

_CPUINFO: Final = Path("/proc/cpuinfo")

# Larger batches are cut to this size (`backend.SIZES`), and who comes behind one waits for all of
# it.
_MAX_BATCH: Final = 8
_STREAMS: Final = 2


def default_batch(largest_layer: int) -> int:
    """Return the largest batch where none is chosen: halved until no layer gives more than
    `LARGEST_LAYER` numbers.

    Args:
        largest_layer: numbers that a layer gives for one image, see
        `model.network.library.largest_layer`.
    """
    batch = _MAX_BATCH
    while batch > 1 and batch * largest_layer > LARGEST_LAYER:
        batch //= 2
    return batch


def default_streams(threads: int) -> int:
    """Return how many batches compute at the same time where no number is chosen."""
    return min(_STREAMS, threads)


def keep_freed_memory() -> bool:
    """Let each heap of this process keep up to 64 MiB that it freed; return whether that was done.

    glibc gives freed memory back to the operating system at once when it is at the end of a heap or
    was a large block, and takes it again for the next pass: the kernel then clears thousands of
    pages for each batch. Networks of a few milliseconds an image spend an eighth of their time so.

    Each thread that computes has a heap. `malloc_trim` gives back what the first thread's keeps,
    not the others'. A C library that is not glibc is left as it is, and so is glibc where the
    environment sets its parameters.
    """
    if any(
        name in os.environ
        for name in ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(
        mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP) and mallopt(_TRIM_THRESHOLD, _KEPT)
    )


def give_back_memory() -> None:
    """Give the memory that was freed while a model was made back to the system, where the C library
    is glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def cpu_has_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Return whether the CPU multiplies bfloat16 natively (x86: AVX512-BF16 or AMX; Arm: BF16)."""
    try:
        flags = re.search(r"^(?:flags|Features)\s*:(.*)", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return False
    return flags is not None and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(
        flags[1].split()
    )
