"""Memory that web workers share with an engine process, for pictures on their way.

A worker copies a picture into a buffer, and sends where the buffer begins. The engine answers once
it no longer reads the buffer. The answer, or the end of the connection, frees the buffer. Frames
carry pictures without a buffer.
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
    """The buffers of one worker, by its index; no buffers if the memory is empty."""

    def __init__(self, memory: memoryview, index: int) -> None:
        self._memory = memory
        self._begin = index * PART_BYTES
        self._end = min(self._begin + PART_BYTES, len(memory))
        self.clear()

    def clear(self) -> None:
        """Free all buffers."""
        self._unused = self._begin
        self._bytes: dict[int, int] = {}  # of the picture in each buffer
        self._free: dict[int, list[int]] = {}  # buffers by their bytes

    def put(self, pixels: NDArray[np.uint8]) -> int | memoryview:
        """Copy a picture, and return where its buffer begins; its bytes if no buffer is free."""
        free = self._free.setdefault(pixels.nbytes, [])
        if free:
            buffer = free.pop()  # the last one, because the processor may still cache it
        elif self._unused + pixels.nbytes <= self._end:
            buffer = self._unused
            self._unused += pixels.nbytes
        else:
            return np.ascontiguousarray(pixels).reshape(-1).data
        np.ndarray(pixels.shape, np.uint8, self._memory, buffer)[...] = pixels
        self._bytes[buffer] = pixels.nbytes
        return buffer

    def free(self, buffer: int | memoryview) -> None:
        """Free a buffer; bytes without a buffer have no effect."""
        if isinstance(buffer, int):
            self._free[self._bytes.pop(buffer)].append(buffer)
