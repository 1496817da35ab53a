"""The memory of a model: the bytes of its tensors, and on a GPU what torch allocated for it."""

import sys

# Bytes of a parameter by dtype; two for others.
_ITEM_BYTES = {"float32": 4}


class Meter:
    """Measures the memory of a model, from the start of its construction."""

    def __init__(self) -> None:
        self._before = _allocated()

    def size(self, parameters: int, dtype: str) -> int:
        """Return the bytes that torch has allocated on GPUs since, at least the parameters' bytes.

        The resident memory of the process does not tell one model's: equal networks made it grow
        by 9.8 to 97 MB, because a heap keeps and reuses freed memory.
        """
        return max(_allocated() - self._before, parameters * _ITEM_BYTES.get(dtype, 2))


def _allocated() -> int:
    """Return the bytes that torch allocated on GPUs in this process."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # another thread may be importing torch
    is_used = getattr(cuda, "is_initialized", None)
    if cuda is None or is_used is None or not is_used():
        return 0
    return sum(map(cuda.memory_allocated, range(cuda.device_count())))
