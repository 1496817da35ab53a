"""Where pictures are stored for GET /attention: the model's inputs, never the uploads.

In memory of this process, or in Redis, where all replicas of a service find them. There each
picture is a key that expires; a sorted set has their ids by age, so that the oldest go first when
there are too many. A picture that cannot be stored costs its answer the id and nothing else.
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
"""What Redis takes for a picture beside its bytes: two keys, an expiry, an entry of the sorted set.
"""

_TIMEOUT_SECONDS: Final = 0.25
_PAUSE_SECONDS: Final = 1.0
_MAX_PAUSE_SECONDS: Final = 8.0
_MAX_LOGGED: Final = 200

# The members of the sorted set are `COST:ID`, so that a removal knows its bytes. Their sum has a
# key of its own; where Redis pushed that key out for lack of memory, it is added up again.
_PUT: Final = """
local order, picture, evictions, sum = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, value, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
local cost, most = tonumber(ARGV[4]), tonumber(ARGV[5])
local prefix = string.sub(picture, 1, -1 - string.len(id))
local member = ARGV[4] .. ':' .. id
local function cost_of(member) return tonumber(string.match(member, '^%d+')) end

local bytes = tonumber(redis.call('GET', sum))
if not bytes then
    bytes = 0
    for _, stored in ipairs(redis.call('ZRANGE', order, 0, -1)) do bytes = bytes + cost_of(stored) end
end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
for _, expired in ipairs(redis.call('ZRANGEBYSCORE', order, '-inf', now - 1000 * ttl)) do
    redis.call('ZREM', order, expired)
    bytes = bytes - cost_of(expired)
end
if redis.call('ZREM', order, member) == 1 then bytes = bytes - cost end
while bytes + cost > most do
    local oldest = redis.call('ZPOPMIN', order)[1]
    if not oldest then
        bytes = 0
        break
    end
    redis.call('UNLINK', prefix .. string.match(oldest, ':(.*)'))
    redis.call('INCR', evictions)
    bytes = bytes - cost_of(oldest)
end
redis.call('SET', picture, value, 'PX', ttl)
redis.call('ZADD', order, now, member)
redis.call('PEXPIRE', order, ttl)
bytes = bytes + cost
redis.call('SET', sum, string.format('%.0f', bytes), 'PX', ttl)
return {redis.call('ZCARD', order), bytes, tonumber(redis.call('GET', evictions) or '0')}
"""

_OVERHEAD_IN_MEMORY = 768
"""What a picture takes beside its pixels: an array's header, the region's numbers, the dictionary's
entry.
"""


_ids: list[str] = []
os.register_at_fork(after_in_child=_ids.clear)


def new_image_id() -> str:
    """Return an id that nobody guesses: 128 bits of the system's randomness."""
    if not _ids:  # for many: each call of the system lets other threads run Python, and this one waits for its turn
        block = secrets.token_bytes(16 * 64)
        _ids.extend(
            base64.urlsafe_b64encode(block[at : at + 16])[:22].decode()
            for at in range(0, len(block), 16)
        )
    return _ids.pop()


def id_of_kind(image_id: str, preprocess: PreprocessConfig) -> str:
    """Return where the picture of an id is stored as a preprocessing gives it: a model sees no
    other one's.
    """
    return f"{image_id}.{_kind(preprocess)}"


@lru_cache
def _kind(preprocess: PreprocessConfig) -> str:
    digest = hashlib.sha256(preprocess.model_dump_json().encode()).digest()
    return base64.urlsafe_b64encode(digest)[:8].decode()


class StoreUsage(NamedTuple):
    """The pictures that a store holds, their bytes, and how many were pushed out before their time,
    since the start.
    """

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
    """Stores at most `max_bytes` of pictures, each for `ttl` seconds of the monotonic `clock`; the
    oldest goes first.

    A limit of 0 stores nothing. Belongs to one event loop. `on_evicted` is called with the age in
    seconds of each picture that is pushed out before its time.
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
    """Stores at most `max_bytes` of pictures in Redis, each for `ttl` seconds; the oldest goes
    first.

    When Redis fails, all waiting requests go on at once, and later ones do not ask it during a
    pause. After the pause one request at a time asks; each further failure doubles the pause.

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

        self._redis = Redis.from_url(
            url, socket_timeout=_TIMEOUT_SECONDS, socket_connect_timeout=_TIMEOUT_SECONDS
        )
        # The braces keep all keys of a name on one node of a cluster.
        self._prefix = f"{{vitserve:{name}}}:"
        self._milliseconds = math.ceil(1000 * ttl)
        self._max_bytes = max_bytes
        self._failed = failed
        self._clock = clock
        self._paused_until = -math.inf
        self._pause_seconds = 0.0
        self._is_probing = False
        self._waiting = set[asyncio.Timeout]()
        self._put = self._redis.register_script(_PUT)
        self._usage = StoreUsage()

    async def put(self, picture: ModelInput, image_id: str | None = None) -> str | None:
        """Store a picture; see `ImageStore.put`."""
        pixels = picture.pixels
        value = _HEADER.pack(*pixels.shape, *picture.region) + pixels.tobytes()
        cost = len(value) + _OVERHEAD_IN_REDIS
        if self._milliseconds == 0 or cost > self._max_bytes:
            return None
        image_id = image_id or new_image_id()
        names = ("order-by-age", f"picture:{image_id}", "evictions", "bytes")
        keys = [f"{self._prefix}{name}" for name in names]
        limits = (self._milliseconds, cost, self._max_bytes)

        async def store() -> str:
            pictures, size, evicted = await self._put(keys, [image_id, value, *limits])
            self._usage = StoreUsage(int(pictures), int(size), int(evicted))
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
            except (
                struct.error,
                ValueError,
                OverflowError,
            ):  # of another version: Redis itself is well
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
        """Return Redis' answer, or None if there is none that makes sense, or none is asked for
        now.
        """
        if self._is_probing or self._clock() < self._paused_until:
            self._failed()
            return None
        self._is_probing = self._pause_seconds > 0
        limit = asyncio.timeout(_TIMEOUT_SECONDS)
        self._waiting.add(limit)
        try:
            async with limit:
                answer = await question()
        except Exception as error:  # noqa: BLE001  what is no Redis, or keeps something else, fails in any way
            self._waiting.discard(limit)
            self._failed()
            self._pause(error)
            return None
        finally:
            self._waiting.discard(limit)
            self._is_probing = False
        self._pause_seconds = 0.0
        return answer

    def _pause(self, error: Exception) -> None:
        """Leave Redis alone for a while, and end the waits of other requests; the first of them
        logs.
        """
        if self._clock() < self._paused_until:
            return
        self._pause_seconds = min(max(2 * self._pause_seconds, _PAUSE_SECONDS), _MAX_PAUSE_SECONDS)
        self._paused_until = self._clock() + self._pause_seconds
        now = asyncio.get_running_loop().time()
        for limit in self._waiting:
            if not limit.expired():
                limit.reschedule(now)
        # It may quote what was answered, of any length and with line breaks.
        text = (
            (str(error) or type(error).__name__)[:_MAX_LOGGED]
            .encode("unicode_escape")
            .decode("ascii")
        )
        logger.warning("kept pictures: Redis does not answer: %s", text)
