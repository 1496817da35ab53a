"""Where pictures are stored for GET /attention: the model's inputs, never the uploads.

In memory of this process, or in Redis, where all replicas of a service find them. There each picture is a key that
expires; a sorted set has their ids by age, so that the oldest go first when there are too many. A picture that cannot
be stored costs its answer the id and nothing else.
"""

import asyncio
import base64
import hashlib
import logging
import math
import os
import re
import secrets
import struct
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np

from model.config import PreprocessConfig
from model.images.preprocess import ModelInput, Region

logger = logging.getLogger("vitserve")

T = TypeVar("T")

_HEADER: Final = struct.Struct("<3I4d")
"""What stands before the pixels: shape and region."""

_ID: Final = re.compile(r"[A-Za-z0-9_-]{22}(\.[A-Za-z0-9_-]{8})?")

_OVERHEAD_IN_REDIS: Final = 512
"""What Redis takes for a picture beside its bytes: two keys, an expiry, an entry of the sorted set."""

_TIMEOUT_SECONDS: Final = 0.25
_PAUSE_SECONDS: Final = 1.0
_MAX_LOGGED: Final = 200

_PUT: Final = """
local order, picture, evictions = KEYS[1], KEYS[2], KEYS[3]
local id, value, ttl, most = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('ZREMRANGEBYSCORE', order, '-inf', now - 1000 * ttl)
local evicted = redis.call('ZCARD', order) + 1 - most
if evicted > 0 then
    local prefix = string.sub(picture, 1, -1 - string.len(id))
    for place, oldest in ipairs(redis.call('ZPOPMIN', order, evicted)) do
        if place % 2 == 1 then redis.call('UNLINK', prefix .. oldest) end
    end
    redis.call('INCRBY', evictions, evicted)
end
redis.call('SET', picture, value, 'PX', ttl)
redis.call('ZADD', order, now, id)
redis.call('PEXPIRE', order, ttl)
return {redis.call('ZCARD', order), tonumber(redis.call('GET', evictions) or '0')}
"""

_OVERHEAD_IN_MEMORY = 768
"""What a picture takes beside its pixels: an array's header, the region's numbers, the dictionary's entry."""


_ids: list[str] = []
os.register_at_fork(after_in_child=_ids.clear)


def new_image_id() -> str:
    """Return an id that nobody guesses: 128 bits of the system's randomness."""
    if not _ids:  # for many: each call of the system lets other threads run Python, and this one waits for its turn
        block = secrets.token_bytes(16 * 64)
        _ids.extend(base64.urlsafe_b64encode(block[at : at + 16])[:22].decode() for at in range(0, len(block), 16))
    return _ids.pop()


def id_of_kind(image_id: str, preprocess: PreprocessConfig) -> str:
    """Return where the picture of an id is stored as a preprocessing gives it: a model sees no other one's."""
    return f"{image_id}.{_kind(preprocess)}"


@lru_cache
def _kind(preprocess: PreprocessConfig) -> str:
    digest = hashlib.sha256(preprocess.model_dump_json().encode()).digest()
    return base64.urlsafe_b64encode(digest)[:8].decode()


class StoreUsage(NamedTuple):
    """The pictures that a store holds, their bytes, and how many were pushed out before their time, since the start."""

    pictures: int = 0
    size: int = 0
    evicted: int = 0


class ImageStore(Protocol):
    """Stores pictures, each with its region of the original, under unguessable ids."""

    async def put(self, picture: ModelInput, image_id: str | None = None) -> str | None:
        """Store a picture, and return its id, or None if it is not stored.

        By default the id is a new one, 128 bits of the system's randomness.
        """

    async def get(self, image_id: str) -> ModelInput | None:
        """Return the picture, or None if it is unknown, expired or pushed out."""

    def usage(self) -> StoreUsage:
        """Return what is stored now."""

    async def close(self) -> None:
        """Close the connections."""


class MemoryImageStore:
    """Stores at most `max_bytes` of pictures, each for `ttl` seconds of the monotonic `clock`; the oldest goes first.

    A limit of 0 stores nothing. Belongs to one event loop. `on_evicted` is called with the age in seconds of each
    picture that is pushed out before its time.
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

    async def put(self, picture: ModelInput, image_id: str | None = None) -> str | None:
        """Store a picture; see `ImageStore.put`."""
        cost = _bytes_in_memory(picture)
        if self._ttl == 0 or cost > self._max_bytes:
            return None
        image_id = image_id or new_image_id()
        self._drop_expired()
        if image_id in self._pictures:  # two models of one preprocessing store the same picture
            self._remove(image_id)
        while self._pictures and self._bytes + cost > self._max_bytes:
            oldest = next(iter(self._pictures))
            expires, _ = self._pictures[oldest]
            self._remove(oldest)
            self._evicted += 1
            self._on_evicted(self._clock() + self._ttl - expires)
        self._insert(image_id, picture)
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
        while self._pictures:
            image_id, (expires, _) = next(iter(self._pictures.items()))
            if expires > now:
                return
            self._remove(image_id)

    def _insert(self, image_id: str, picture: ModelInput) -> None:
        """Add an entry with its bytes; no entry has this id."""
        self._pictures[image_id] = (self._clock() + self._ttl, picture)
        self._bytes += _bytes_in_memory(picture)

    def _remove(self, image_id: str) -> None:
        """Remove an entry with its bytes."""
        _, picture = self._pictures.pop(image_id)
        self._bytes -= _bytes_in_memory(picture)


def _bytes_in_memory(picture: ModelInput) -> int:
    return picture.pixels.nbytes + _OVERHEAD_IN_MEMORY


class RedisImageStore:
    """Stores at most `max_bytes` of pictures in Redis, each for `ttl` seconds; the oldest goes first.

    Args:
        url: as redis-py reads it: `redis://`, `rediss://` or `unix://`.
        name: of the model; replicas of another model have pictures of their own.
        failed: called for each picture that could not be stored or looked for.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        ttl: float,
        max_bytes: int,
        failed: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from redis.asyncio import Redis  # noqa: PLC0415  an optional package, which the settings have looked for

        self._redis = Redis.from_url(url, socket_timeout=_TIMEOUT_SECONDS, socket_connect_timeout=_TIMEOUT_SECONDS)
        # The braces keep all keys of a name on one node of a cluster.
        self._prefix = f"{{vitserve:{name}}}:"
        self._milliseconds = math.ceil(1000 * ttl)
        self._max_bytes = max_bytes
        self._failed = failed
        self._clock = clock
        self._paused_until = -math.inf
        self._put = self._redis.register_script(_PUT)
        self._usage = StoreUsage()

    async def put(self, picture: ModelInput, image_id: str | None = None) -> str | None:
        """Store a picture; see `ImageStore.put`."""
        pixels = picture.pixels
        value = _HEADER.pack(*pixels.shape, *picture.region) + pixels.tobytes()
        cost = len(value) + _OVERHEAD_IN_REDIS
        most = self._max_bytes // cost
        if self._milliseconds == 0 or most == 0:
            return None
        image_id = image_id or new_image_id()
        keys = [f"{self._prefix}{key}" for key in ("order", f"picture:{image_id}", "evictions")]

        async def store() -> str:
            pictures, evicted = await self._put(keys, [image_id, value, self._milliseconds, most])
            self._usage = StoreUsage(int(pictures), int(pictures) * cost, int(evicted))
            return image_id

        return await self._ask(store)

    async def get(self, image_id: str) -> ModelInput | None:
        """Return the picture, or None where Redis does not answer, too; see `ImageStore.get`."""
        if not _ID.fullmatch(image_id):
            return None

        async def find() -> ModelInput | None:
            data = await self._redis.get(f"{self._prefix}picture:{image_id}")
            if not isinstance(data, bytes):
                return None
            try:
                rows, columns, channels, *region = _HEADER.unpack_from(data)
                pixels = np.frombuffer(data, np.uint8, rows * columns * channels, _HEADER.size)
                return ModelInput(pixels.reshape(rows, columns, channels), Region(*region))
            except (struct.error, ValueError, OverflowError):  # of another version: Redis itself is well
                self._failed()
                return None

        return await self._ask(find)

    def usage(self) -> StoreUsage:
        """Return what all replicas stored, as of this process's last picture."""
        return self._usage

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _ask(self, question: Callable[[], Awaitable[T | None]]) -> T | None:
        """Return Redis' answer, or None when there is none that makes sense; it is then left alone for a moment."""
        if self._clock() < self._paused_until:
            self._failed()
            return None
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                return await question()
        except Exception as error:  # noqa: BLE001  what is no Redis, or keeps something else, fails in any way
            self._paused_until = self._clock() + _PAUSE_SECONDS
            self._failed()
            # It may quote what was answered, of any length and with line breaks.
            text = (str(error) or type(error).__name__)[:_MAX_LOGGED].encode("unicode_escape").decode("ascii")
            logger.warning("kept pictures: Redis does not answer: %s", text)
            return None
