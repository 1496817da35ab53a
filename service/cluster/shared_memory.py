"""Gives the processes of one service shared memory: anonymous, sized from the settings, freed with its last user.

It is made before the processes are forked and inherited by them. It has no name (Python 3.11 unlinks
named segments that are still in use) and does not lie in /dev/shm (64 MiB in a container).

Each cell has a single writer. What several processes write is guarded by a lock that the kernel releases when its
holder dies. So a process that is killed at any moment leaves nothing that others wait for or read wrongly.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from service.web.admission import ByteBudget, Limiter
from service.web.api_keys import KeyLimiter

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02


class SharedFile:
    """An anonymous file in memory for all who inherit its descriptor; pages take memory when they are first written."""

    def __init__(self, name: str) -> None:
        # The name is shown in /proc, for people.
        self._descriptor = os.memfd_create(f"vitserve-{name}", os.MFD_CLOEXEC)

    def grow(self, size: int) -> None:
        """Make it at least `size` bytes, new bytes zero; a single process may. It never shrinks: others map it."""
        if os.fstat(self._descriptor).st_size < size:
            os.ftruncate(self._descriptor, size)

    def reserve(self, size: int) -> None:
        """Make it at least `size` bytes whose memory is taken now; raises `OSError` when there is not so much."""
        os.posix_fallocate(self._descriptor, 0, size)

    @property
    def path(self) -> str:
        """Return a path by which this process, and those that inherit the file, may open it."""
        return f"/proc/self/fd/{self._descriptor}"

    def map(self, size: int, offset: int = 0) -> mmap.mmap:
        """Return a view of `size` bytes from `offset`, a multiple of the page size."""
        return mmap.mmap(self._descriptor, size, mmap.MAP_SHARED, offset=offset)

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`, fewer at the end."""
        return os.pread(self._descriptor, size, offset)

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes at `offset`; the file grows as needed."""
        os.pwrite(self._descriptor, data, offset)

    def free(self, offset: int, size: int) -> None:
        """Give whole pages back to the system; they read as zeros from now on. Raises `OSError` when it cannot."""
        if _libc.fallocate(self._descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, offset, size):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock against other processes, not threads of this process; the kernel releases it with the process."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def empty(self) -> None:
        """Give all pages back to the system; its size stays."""
        size = os.fstat(self._descriptor).st_size
        if size:
            self.free(0, size)

    def close(self) -> None:
        """Close the descriptor; maps stay valid."""
        os.close(self._descriptor)


class SharedText:
    """A text of at most `MOST` characters that one process writes and others read."""

    MOST = 4096

    def __init__(self, text: str = "") -> None:
        self._memory = mmap.mmap(-1, 4 + 4 * self.MOST)
        self.write(text)

    def write(self, text: str) -> None:
        """Replace the text; what is longer loses its end. A text that is half written reads as empty."""
        data = text[: self.MOST].encode(errors="surrogatepass")
        self._memory[:4] = bytes(4)
        self._memory[4 : 4 + len(data)] = data
        self._memory[:4] = len(data).to_bytes(4, "little")

    def read(self) -> str:
        """Return the text."""
        seen, whole = b"", self._memory[:]
        while whole != seen:  # it is being written: half of the old text and half of the new one are neither
            seen, whole = whole, self._memory[:]
        length = int.from_bytes(whole[:4], "little")
        return whole[4 : 4 + length].decode(errors="surrogatepass")


def whole_pages(size: int) -> int:
    """Return `size` rounded up to pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class ImageSlots:
    """Slots for images between one web worker and one engine.

    The worker writes a slot before it submits it and leaves it alone until the engine has answered. A
    part of the file belongs to one worker; a worker that is started again takes over its predecessor's
    part, whose images nobody waits for any more.

    Args:
        file: of the engine, which has grown it to `size` a worker.
        shape: of an image, (rows, columns, channels).
    """

    def __init__(self, file: SharedFile, worker: int, slots: int, shape: tuple[int, int, int]) -> None:
        size = self.size(slots, shape)
        memory = file.map(size, worker * size)
        self._images = np.frombuffer(memory, np.uint8, slots * math.prod(shape)).reshape(slots, *shape)
        self.count = slots

    @staticmethod
    def size(slots: int, shape: tuple[int, int, int]) -> int:
        """Return the bytes of one worker's part."""
        return whole_pages(slots * math.prod(shape))

    def __getitem__(self, slot: int) -> NDArray[np.uint8]:
        """Return the image in a slot, uint8 [H, W, C], as a view; raises `IndexError` when there is no such slot."""
        image: NDArray[np.uint8] = self._images[slot]
        return image


class SharedCounters:
    """Numbers, uint64, that all processes of a service read; each cell has one writer.

    Attributes:
        capacity: images in the service at once, over all workers.
        lock: guards what is read and written in one step.
        permits_taken: [workers]; written by the worker.
        received_bytes: [workers], of bodies whose requests are not answered yet; written by the worker.
        key_requests: [workers, keys], in flight; written by the worker.
        outstanding: [workers, engines], images without an outcome yet; written by the worker.
        worker_state: [workers], see `LISTENING` and `SERVING`; written by the worker.
        worker_beats: [workers], see `service.cluster.heartbeat`; written by the worker.
        engine_ready: [engines], 1 from when it is warm; written by the engine.
        engine_beats: [engines], as `worker_beats`; written by the engine.
        queue_depth: [engines]; written by the engine.
        restarts: [engines]; written by the supervisor.
        seconds: [1], of the service's life: the clock that all processes can read; written by the supervisor.
    """

    LISTENING = 1
    SERVING = 2

    def __init__(self, *, workers: int, engines: int, capacity: int, keys: int = 0) -> None:
        self.capacity = capacity
        self.lock = SharedFile("counters")
        self.permits_taken, self.worker_state, self.received_bytes, self.worker_beats = shared_zeros(4, workers)
        self.key_requests = shared_zeros(workers, max(1, keys))
        self.outstanding = shared_zeros(workers, engines)
        self.engine_ready, self.engine_beats, self.queue_depth, self.restarts = shared_zeros(4, engines)
        self.seconds = shared_zeros(1)

    def limiter(self, worker: int) -> Limiter:
        """Return what limits the images of all workers together, and counts those of this one."""
        return Limiter(self.capacity, self.permits_taken, worker, self.lock.locked)

    def byte_budget(self, worker: int, capacity: int) -> ByteBudget:
        """Return what limits the bytes of bodies of all workers together, and counts those of this one."""
        return ByteBudget(capacity, self.received_bytes, worker)

    def key_limiter(self, worker: int, limit: int) -> KeyLimiter:
        """Return what limits each key's requests over all workers together, and counts those of this one."""
        return KeyLimiter(self.key_requests.shape[1], limit, self.key_requests, worker, self.lock.locked)

    def all_ready(self) -> bool:
        """Return whether all engines are loaded and all workers know of it."""
        return bool(self.engine_ready.all() and (self.worker_state == self.SERVING).all())

    def forget_engine(self, engine: int) -> None:
        """Clear the cells of an engine that ended, but for the count of its starts."""
        self.engine_ready[engine] = 0
        self.queue_depth[engine] = 0

    def count_restart(self, engine: int) -> None:
        """Count one more start of an engine."""
        self.restarts[engine] += 1

    def forget_worker(self, worker: int) -> None:
        """Clear the cells of a worker that ended, so that its permits and its bytes are free."""
        self.permits_taken[worker] = 0
        self.received_bytes[worker] = 0
        self.key_requests[worker] = 0
        self.outstanding[worker] = 0
        self.worker_state[worker] = 0

    def close(self) -> None:
        """Close the lock's file."""
        self.lock.close()


def shared_zeros(*shape: int) -> NDArray[np.uint64]:
    """Return zeros that this process shares with those that it forks."""
    return np.frombuffer(mmap.mmap(-1, 8 * math.prod(shape)), np.uint64).reshape(shape)
