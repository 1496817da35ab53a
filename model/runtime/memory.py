"""The memory of a model: the bytes of its tensors, and on a GPU what torch allocated for it."""

import sys

# Bytes of a parameter, by the dtype's name; else two.
_ITEM_BYTES = {"float32": 4}


class Meter:
    """Measures the memory of a model, from its making on."""

    def __init__(self) -> None:
        self._before = _allocated()

    def size(self, parameters: int, dtype: str) -> int:
        """Return the bytes that torch allocated on GPUs since, but at least those of the
        parameters.

        The resident memory of the process says nothing about one model: of equal networks it grew
        by 9.8 to 97 MB, because a heap keeps and reuses what others freed.
        """
        return max(_allocated() - self._before, parameters * _ITEM_BYTES.get(dtype, 2))


def _allocated() -> int:
    """Return the bytes that torch allocated on GPUs in this process."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # another thread may be importing torch
    is_used = getattr(cuda, "is_initialized", None)
    return cuda.memory_allocated() if cuda is not None and is_used is not None and is_used() else 0
