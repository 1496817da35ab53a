"""Keeps pictures for GET /attention, for all web workers of one service together.

A ring in shared memory: cells of one size (a model's pictures all have the same), the oldest at `first`,
the next one to write at `after`. When a model of another input size takes over, the ring begins anew: the old
model's pictures are of no more use. Cells are read and written as a file and never mapped, so a worker's
memory does not grow with what the others keep.

An expired picture is never returned. Its memory is freed by the calls that follow, each no more than
`_FREE_BYTES` of it: the lock is held on the event loops of all workers.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import math
import secrets
import struct
from collections.abc import Callable

import numpy as np

from model.images.preprocess import ModelInput
from model.images.region import Region
from service.cluster.shared_memory import SharedFile, whole_pages
from service.web.image_stores import StoreUsage

_RING = struct.Struct("<QQQQ")
"""The first picture, the place after the last, the bytes of a cell, and the number of pictures that were pushed out."""

_CELL = struct.Struct("<16sQIII4d")
"""What stands before the pixels: token, second of expiry, shape and region."""

_TOKEN_BYTES = 16
_FREE_BYTES = 4 << 20
"""Bytes that a call frees at most, in about half a millisecond; a cell if that is more."""


class SharedImageStore:
    """A bounded store of model-size pictures, oldest out first, each valid for `ttl` seconds.

    Args:
        file: used for nothing else.
        ttl: seconds, rounded up to whole ones; 0 keeps nothing.
        max_bytes: memory for all pictures; 0 keeps nothing.
        clock: whole seconds, the same for all workers.
    """

    def __init__(self, file: SharedFile, *, ttl: float, max_bytes: int, clock: Callable[[], int]) -> None:
        self._file = file
        self._ttl = math.ceil(ttl)
        self._max_bytes = max_bytes
        self._clock = clock

    async def put(self, picture: ModelInput) -> str | None:
        """Keep a picture; see `ImageStore.put`. Its id is 128 bits of the system's randomness, and where to look."""
        pixels = picture.pixels
        cost = whole_pages(_CELL.size + pixels.nbytes)
        if self._ttl == 0 or cost > self._max_bytes:
            return None
        token = secrets.token_bytes(_TOKEN_BYTES)
        with self._file.locked():
            live, first, after, cell, evicted = self._look()
            if cell != cost:  # the first picture of all, or of a model of another input size
                if first != after:
                    self._file.free(whole_pages(_RING.size), self._max_bytes // cell * cell)
                first, cell = after, cost
            if after - first >= self._max_bytes // cell:
                evicted += first == live  # else it has expired
                first += 1  # its cell is the one that is written now
            header = _CELL.pack(token, self._clock() + self._ttl, *pixels.shape, *picture.region)
            self._file.write(self._at(after, cell), header + pixels.tobytes())
            # Only now: a worker that is killed before this line has kept nothing.
            self._write_ring(first, after + 1, cell, evicted)
        return base64.urlsafe_b64encode(token + after.to_bytes(8, "big")).decode()

    async def get(self, image_id: str) -> ModelInput | None:
        """Return the picture, or None; see `ImageStore.get`."""
        try:
            given = base64.b64decode(image_id, b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        if len(given) != _TOKEN_BYTES + 8:
            return None
        number = int.from_bytes(given[_TOKEN_BYTES:], "big")
        with self._file.locked():
            live, _, after, cell, _ = self._look()
            if not live <= number < after:
                return None
            data = self._file.read(self._at(number, cell), cell)
        token, _, *shape_and_region = _CELL.unpack_from(data)
        if not secrets.compare_digest(token, given[:_TOKEN_BYTES]):
            return None
        shape = shape_and_region[:3]
        pixels = np.frombuffer(data, np.uint8, math.prod(shape), _CELL.size).reshape(shape)
        return ModelInput(pixels, Region(*shape_and_region[3:]))

    async def close(self) -> None:
        """Do nothing: memory goes with its process."""

    def usage(self) -> StoreUsage:
        """Return what is kept now."""
        with self._file.locked():
            live, _, after, cell, evicted = self._look()
        return StoreUsage(after - live, (after - live) * cell, evicted)

    def _look(self) -> tuple[int, int, int, int, int]:
        """Free some of the expired pictures.

        Returns:
            live: the oldest picture that has not expired.
            first: the oldest whose cell is not freed.
            after: the next one to write.
            cell: bytes of a cell.
            evicted: pictures that were pushed out before their time was over.
        """
        first, after, cell, evicted = _RING.unpack(self._file.read(0, _RING.size).ljust(_RING.size, b"\0"))
        now = self._clock()
        if first == after or self._expires(first, cell) > now:
            return first, first, after, cell, evicted
        # All live equally long, so they expire in the order of their numbers.
        live = first + bisect.bisect(range(first, after), now, key=lambda number: self._expires(number, cell))
        cells = self._max_bytes // cell
        # As many as lie side by side, up to the end of the ring.
        count = min(live - first, cells - first % cells, max(1, _FREE_BYTES // cell))
        self._file.free(self._at(first, cell), count * cell)
        self._write_ring(first + count, after, cell, evicted)
        return live, first + count, after, cell, evicted

    def _expires(self, number: int, cell: int) -> int:
        """Return the second from which a picture is expired."""
        _, expires, *_ = _CELL.unpack(self._file.read(self._at(number, cell), _CELL.size))
        return int(expires)

    def _write_ring(self, first: int, after: int, cell: int, evicted: int) -> None:
        self._file.write(0, _RING.pack(first, after, cell, evicted))

    def _at(self, number: int, cell: int) -> int:
        """Return the offset of a cell; the ring's own numbers have the first page."""
        return whole_pages(_RING.size) + number % (self._max_bytes // cell) * cell
