"""Settings that backends on a CPU share: threads, batch sizes, heap memory, native dtypes."""

import ctypes
import os
import re
import threading
from pathlib import Path
from typing import Final

from model.config import LARGEST_LAYER
from model.cores import compute_threads

# Parameters of `mallopt`: see mallopt(3).
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3

# glibc takes blocks up to this number of bytes from a heap, the most that it allows. By itself it
# would raise the limit to this only after the first free of such a block.
_LARGEST_IN_HEAP: Final = 32 << 20

# Free bytes at the end of a heap that the process keeps; glibc's own rule is twice the largest
# block.
_KEPT: Final = 2 * _LARGEST_IN_HEAP

# Environment variables that set these parameters.
_GLIBC_VARIABLES: Final = {
    "GLIBC_TUNABLES",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
}

_BFLOAT16_FLAGS: Final = {"avx512_bf16", "amx_bf16", "bf16"}
CPUINFO: Final = Path("/proc/cpuinfo")

# Largest batch by default. Larger ones would be cut into pieces of this size (see `SIZES`), and a
# request that arrives meanwhile would wait for all pieces.
_MAX_BATCH: Final = 8
_STREAMS: Final = 2


class ThreadPolicy:
    """Gives a batch all threads if it is alone, and one thread if others are being computed.

    A batch on a single thread needs no barriers between operators. On a busy machine, threads wait
    long for each other at barriers. A lone batch finishes sooner with all `count` threads. This is
    a context manager around the computation, and entering it returns whether the batch is alone.
    Explanations count as a batch, though they always use one thread. Batches of other models in
    this process count too, because they share the cores.

    Attributes:
        count: threads of a lone batch.
        streams: batches that are computed at the same time.
    """

    _lock = threading.Lock()
    _running = 0

    def __init__(self, count: int | None, streams: int | None) -> None:
        """Choose a count if it is None."""
        self.count = count or compute_threads()
        self.streams = streams or min(_STREAMS, self.count)

    def __enter__(self) -> bool:
        with ThreadPolicy._lock:
            ThreadPolicy._running += 1
            return ThreadPolicy._running == 1

    def __exit__(self, *_: object) -> None:
        with ThreadPolicy._lock:
            ThreadPolicy._running -= 1


def default_batch(largest_layer: int) -> int:
    """Return the largest batch if none is chosen.

    It is halved until no layer gives more than `LARGEST_LAYER` numbers.

    Args:
        largest_layer: numbers that a layer gives for one image, see
            `model.network.library.largest_layer`.
    """
    batch = _MAX_BATCH
    while batch > 1 and batch * largest_layer > LARGEST_LAYER:
        batch //= 2
    return batch


def keep_freed_memory() -> bool:
    """Make each heap of this process keep up to 64 MiB of freed memory; return whether it does.

    By default glibc returns freed memory to the operating system at once if it was a large block or
    is at the end of a heap. The next pass takes it again, and the kernel clears thousands of pages
    for each batch. Networks of a few milliseconds per image spend an eighth of their time on that.

    Each computing thread has a heap. `malloc_trim` returns only the memory that the first thread's
    heap keeps. Other C libraries than glibc stay unchanged, and so does glibc if the environment
    sets its parameters.
    """
    if not os.environ.keys().isdisjoint(_GLIBC_VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP) and mallopt(_TRIM_THRESHOLD, _KEPT))


def give_back_memory() -> None:
    """Return freed memory to the operating system, for example after a model is built.

    This needs glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 natively (x86: AVX512-BF16 or AMX; Arm: BF16)."""
    try:
        flags = re.search(r"^(?:flags|Features)\s*:(.*)", CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        return False
    if flags is None:
        return False
    return not _BFLOAT16_FLAGS.isdisjoint(flags[1].split())
