"""Where pictures are kept for GET /attention: the inputs of models, never the uploads.

If a picture cannot be stored, its answer lacks the id, and nothing else changes.
"""

import base64
import hashlib
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple, Protocol, runtime_checkable

from model.config import PreprocessConfig
from model.images.preprocess import ModelInput

_OVERHEAD_BYTES: Final = 768
"""Memory of a picture besides its pixels: the array's header, the region, the dictionary's entry.
"""

_IDS_AT_ONCE: Final = 64

_ids: list[str] = []
os.register_at_fork(after_in_child=_ids.clear)


def new_image_id() -> str:
    """Return an unguessable id: 128 bits of the system's randomness."""
    if not _ids:
        # Each system call lets other threads take the interpreter, so one call serves many ids.
        block = secrets.token_bytes(16 * _IDS_AT_ONCE)
        _ids.extend(
            base64.urlsafe_b64encode(block[start : start + 16])[:22].decode()
            for start in range(0, len(block), 16)
        )
    return _ids.pop()


def store_key(image_id: str, preprocess: PreprocessConfig) -> str:
    """Return the store's key of a picture, which includes its preprocessing.

    So a model never gets a picture that was preprocessed for another model.
    """
    return f"{image_id}.{_kind(preprocess)}"


@lru_cache
def _kind(preprocess: PreprocessConfig) -> str:
    digest = hashlib.sha256(preprocess.model_dump_json().encode()).digest()
    return base64.urlsafe_b64encode(digest)[:8].decode()


class StoreUsage(NamedTuple):
    """The contents of a store.

    Attributes:
        pictures: number of stored pictures.
        size: their bytes.
        evicted: number of pictures that were evicted before they expired, since the start.
    """

    pictures: int = 0
    size: int = 0
    evicted: int = 0


@runtime_checkable
class ImageStore(Protocol):
    """Stores pictures, each with its region of the original, under unguessable ids."""

    async def put(self, picture: ModelInput, image_id: str) -> bool:
        """Store a picture under an id; return whether it is stored."""

    async def get(self, image_id: str) -> ModelInput | None:
        """Return the picture, or None if it is unknown, expired or evicted."""

    def usage(self) -> StoreUsage:
        """Return the number and bytes of the stored pictures."""

    async def close(self) -> None:
        """Close the connections."""


class MemoryImageStore:
    """Stores at most `max_bytes` of pictures, each for `ttl` seconds.

    The oldest picture is evicted first. With a limit of 0 nothing is stored. Belongs to one event
    loop.

    Args:
        ttl: lifetime of a picture in seconds of `clock`.
        max_bytes: limit on the bytes of all pictures.
        clock: monotonic seconds.
        on_evicted: called with the age in seconds of each evicted picture.
    """

    def __init__(
        self,
        *,
        ttl: float,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        on_evicted: Callable[[float], object] = lambda _: None,
    ) -> None:
        self._ttl = ttl
        self._max_bytes = max_bytes
        self._clock = clock
        self._on_evicted = on_evicted
        self._pictures: OrderedDict[str, tuple[float, ModelInput]] = OrderedDict()
        self._bytes = 0
        self._evicted = 0

    async def put(self, picture: ModelInput, image_id: str) -> bool:
        """Store a picture; see `ImageStore.put`."""
        cost = _cost(picture)
        if self._ttl == 0 or cost > self._max_bytes:
            return False
        self._drop_expired()
        if image_id in self._pictures:  # two models of one preprocessing store the same picture
            self._remove(image_id)
        while self._pictures and self._bytes + cost > self._max_bytes:
            self._evict_oldest()
        self._pictures[image_id] = (self._clock() + self._ttl, picture)
        self._bytes += cost
        return True

    async def get(self, image_id: str) -> ModelInput | None:
        """Return the picture; see `ImageStore.get`."""
        self._drop_expired()
        _, picture = self._pictures.get(image_id, (0.0, None))
        return picture

    def usage(self) -> StoreUsage:
        """Return the number and bytes of the stored pictures."""
        self._drop_expired()
        return StoreUsage(len(self._pictures), self._bytes, self._evicted)

    async def close(self) -> None:
        """Do nothing."""

    def _drop_expired(self) -> None:
        now = self._clock()
        # All pictures live equally long, so the oldest expires first.
        while self._pictures:
            image_id, (expires, _) = next(iter(self._pictures.items()))
            if expires > now:
                return
            self._remove(image_id)

    def _evict_oldest(self) -> None:
        image_id, (expires, _) = next(iter(self._pictures.items()))
        self._remove(image_id)
        self._evicted += 1
        self._on_evicted(self._clock() + self._ttl - expires)

    def _remove(self, image_id: str) -> None:
        """Remove a picture, and subtract its bytes."""
        _, picture = self._pictures.pop(image_id)
        self._bytes -= _cost(picture)


def _cost(picture: ModelInput) -> int:
    return picture.pixels.nbytes + _OVERHEAD_BYTES
