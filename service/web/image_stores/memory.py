"""The image store in memory of this process."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from model.images.preprocess import ModelInput
from service.web.image_stores import StoreUsage

_OVERHEAD_BYTES = 768
"""What a picture takes beside its pixels: an array's header, the region's numbers, the dictionary's entry."""


class MemoryImageStore:
    """Stores at most `max_bytes` of pictures, each for `ttl` seconds of the monotonic `clock`; the oldest goes first.

    A limit of 0 stores nothing. Belongs to one event loop.
    """

    def __init__(self, *, ttl: float, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl = ttl
        self._max_bytes = max_bytes
        self._clock = clock
        self._pictures: OrderedDict[str, tuple[float, ModelInput]] = OrderedDict()
        self._bytes = 0
        self._evicted = 0

    async def put(self, picture: ModelInput) -> str | None:
        """Store a picture; see `ImageStore.put`."""
        cost = picture.pixels.nbytes + _OVERHEAD_BYTES
        if self._ttl == 0 or cost > self._max_bytes:
            return None
        self._drop_expired()
        while self._bytes + cost > self._max_bytes:
            self._drop_oldest()
            self._evicted += 1
        image_id = secrets.token_urlsafe(16)
        self._pictures[image_id] = (self._clock() + self._ttl, picture)
        self._bytes += cost
        return image_id

    async def get(self, image_id: str) -> ModelInput | None:
        """Return the picture; see `ImageStore.get`."""
        self._drop_expired()
        _, picture = self._pictures.get(image_id, (0.0, None))
        return picture

    def usage(self) -> StoreUsage:
        """Return what is stored now."""
        self._drop_expired()
        return StoreUsage(len(self._pictures), self._bytes, self._evicted)

    async def close(self) -> None:
        """Do nothing: memory goes with its process."""

    def _drop_expired(self) -> None:
        now = self._clock()
        # All live equally long, so the oldest expires first.
        while self._pictures and next(iter(self._pictures.values()))[0] <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, (_, picture) = self._pictures.popitem(last=False)
        self._bytes -= picture.pixels.nbytes + _OVERHEAD_BYTES
