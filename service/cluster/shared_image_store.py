"""Pictures kept for GET /attention by all web workers of one service together.

A ring in shared memory: cells of one size (a model's pictures all have the same), the oldest at `first`,
the next one to write at `after`. Cells are read and written as a file and never mapped, so a worker's
memory does not grow with what the others keep.
"""

from __future__ import annotations

import base64
import binascii
import math
import secrets
import struct
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from service.cluster.shared_memory import SharedFile, whole_pages

_RING = struct.Struct("<QQQ")
_CELL = struct.Struct("<16sQIII")
_TOKEN_BYTES = 16


class SharedImageStore:
    """Bounded memory of model-size pictures, oldest out first, each good for `ttl` seconds.

    Args:
        file: the ring's; used for nothing else.
        ttl: seconds, rounded up to whole ones; 0 keeps nothing.
        max_bytes: memory for all pictures; 0 keeps nothing.
        clock: whole seconds, the same for all workers.
    """

    def __init__(self, file: SharedFile, *, ttl: float, max_bytes: int, clock: Callable[[], int]) -> None:
        self._file = file
        self._ttl = math.ceil(ttl)
        self._max_bytes = max_bytes
        self._clock = clock

    def put(self, pixels: NDArray[np.uint8]) -> str | None:
        """Keep a picture.

        Returns:
            An unguessable id (128 bits of the system's randomness, and where to look), or None if nothing is kept.
        """
        cost = whole_pages(_CELL.size + pixels.nbytes)
        if self._ttl == 0 or cost > self._max_bytes:
            return None
        token = secrets.token_bytes(_TOKEN_BYTES)
        with self._file.locked():
            first, after, cell = self._dropped_expired()
            if cell != cost:  # the first picture of all
                first, cell = after, cost
            if after - first >= self._max_bytes // cell:
                first += 1  # its cell is the one that is written now
            header = _CELL.pack(token, self._clock() + self._ttl, *pixels.shape)
            self._file.write(self._at(after, cell), header + pixels.tobytes())
            # Only now: a worker that is killed before this line has kept nothing.
            self._write_ring(first, after + 1, cell)
        return base64.urlsafe_b64encode(token + after.to_bytes(8, "big")).decode()

    def get(self, image_id: str) -> NDArray[np.uint8] | None:
        """The picture, or None if it is unknown, expired or pushed out."""
        try:
            given = base64.b64decode(image_id, b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        if len(given) != _TOKEN_BYTES + 8:
            return None
        number = int.from_bytes(given[_TOKEN_BYTES:], "big")
        with self._file.locked():
            first, after, cell = self._dropped_expired()
            if not first <= number < after:
                return None
            data = self._file.read(self._at(number, cell), cell)
        token, _, *shape = _CELL.unpack_from(data)
        if not secrets.compare_digest(token, given[:_TOKEN_BYTES]):
            return None
        return np.frombuffer(data, np.uint8, math.prod(shape), _CELL.size).reshape(shape)

    def usage(self) -> tuple[int, int]:
        """(pictures, bytes) kept now."""
        with self._file.locked():
            first, after, cell = self._dropped_expired()
        return after - first, (after - first) * cell

    def _dropped_expired(self) -> tuple[int, int, int]:
        """(first, after, bytes of a cell), the expired ones overwritten."""
        found: tuple[int, int, int] = _RING.unpack(self._file.read(0, _RING.size).ljust(_RING.size, b"\0"))
        first, after, cell = found
        now = self._clock()
        while first < after:
            # All live equally long, so the oldest expires first.
            _, expires, *_ = _CELL.unpack(self._file.read(self._at(first, cell), _CELL.size))
            if expires > now:
                break
            self._file.write(self._at(first, cell), bytes(cell))
            first += 1
        if first != found[0]:
            self._write_ring(first, after, cell)
        return first, after, cell

    def _write_ring(self, first: int, after: int, cell: int) -> None:
        self._file.write(0, _RING.pack(first, after, cell))

    def _at(self, number: int, cell: int) -> int:
        """Where a cell begins; the ring's own numbers have the first page."""
        return whole_pages(_RING.size) + number % (self._max_bytes // cell) * cell
