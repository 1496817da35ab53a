"""Memory that web workers share with an engine process, for pictures on their way.

A worker copies a picture into a slot, and sends where the slot begins. The slot is free again after
the answer, which the engine gives once it does not read the slot any more, or with the end of the
connection. Frames carry pictures without a slot.
"""

import mmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

# A worker's part of the memory; the system provides only the pages that were used.
PART_BYTES: Final = 64 << 20


def shared_memory(workers: int) -> memoryview:
    """Return memory that this process shares with its later children, with a part per worker."""
    return memoryview(mmap.mmap(-1, workers * PART_BYTES))


class SharedPixels:
    """The slots of one worker, by its index; no slots if the memory is empty."""

    def __init__(self, memory: memoryview, index: int) -> None:
        self._memory = memory
        self._begin = index * PART_BYTES
        self._end = min(self._begin + PART_BYTES, len(memory))
        self.clear()

    def clear(self) -> None:
        """Free all slots."""
        self._unused = self._begin
        self._bytes: dict[int, int] = {}  # of the picture in each slot
        self._free: dict[int, list[int]] = {}  # slots by their bytes

    def put(self, pixels: NDArray[np.uint8]) -> int | memoryview:
        """Copy a picture, and return where its slot begins; its bytes if no slot is free."""
        free = self._free.setdefault(pixels.nbytes, [])
        if free:
            slot = free.pop()  # the last one, because the processor may still cache it
        elif self._unused + pixels.nbytes <= self._end:
            slot = self._unused
            self._unused += pixels.nbytes
        else:
            return np.ascontiguousarray(pixels).reshape(-1).data
        np.ndarray(pixels.shape, np.uint8, self._memory, slot)[...] = pixels
        self._bytes[slot] = pixels.nbytes
        return slot

    def free(self, slot: int | memoryview) -> None:
        """Free a slot; bytes without a slot have no effect."""
        if isinstance(slot, int):
            self._free[self._bytes.pop(slot)].append(slot)
