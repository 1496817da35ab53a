"""What a process has of memory: resident, and allocated on a GPU."""

import os
import sys
from pathlib import Path

# Of a parameter, by the dtype's name; else two.
_ITEM_BYTES = {"float32": 4}


class Meter:
    """Measures what a model takes, from its making on."""

    def __init__(self) -> None:
        self._before = _used()

    def size(self, parameters: int, dtype: str) -> int:
        """Return the bytes that were taken since, on the GPU if there are any, but at least those of the parameters."""
        resident, allocated = (after - before for before, after in zip(self._before, _used(), strict=True))
        return max(allocated or resident, parameters * _ITEM_BYTES.get(dtype, 2))


def _used() -> tuple[int, int]:
    """Return the bytes of this process that are resident, where Linux tells, and those that it allocated on GPUs."""
    statm, torch = Path("/proc/self/statm"), sys.modules.get("torch")
    resident = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
    cuda = getattr(torch, "cuda", None)  # another thread may be importing torch
    is_used = getattr(cuda, "is_initialized", None)
    return resident, cuda.memory_allocated() if cuda is not None and is_used is not None and is_used() else 0
