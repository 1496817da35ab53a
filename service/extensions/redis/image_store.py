"""The image store in Redis: each replica finds the pictures of all others.

Each picture is a key that expires. A sorted set holds the ids by age, so that the oldest picture is
evicted first when all together exceed the limit.
"""

import asyncio
import logging
import math
import re
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import numpy as np

from model.images.preprocess import ModelInput, Region
from service.web.image_stores import StoreUsage

logger = logging.getLogger("vitserve")

T = TypeVar("T")

TIMEOUT_SECONDS = 0.25
"""Longest wait for an answer of Redis."""

_HEADER: Final = struct.Struct("<3I4d")
"""Shape and region, which precede the pixels."""

_ID: Final = re.compile(r"[A-Za-z0-9_-]{22}(\.[A-Za-z0-9_-]{8})?")

_OVERHEAD_BYTES: Final = 512
"""Memory of Redis for a picture besides its value: two keys, an expiry, an entry of the sorted set.
"""

_FIRST_PAUSE_SECONDS: Final = 1.0
_MAX_PAUSE_SECONDS: Final = 8.0
_MAX_LOGGED: Final = 200

# A member of the sorted set is `COST:ID`, so that its removal knows the freed bytes. Their sum has
# a key of its own. If Redis evicts that key, the script adds the costs up again.
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
    for _, stored in ipairs(redis.call('ZRANGE', order, 0, -1)) do
        bytes = bytes + cost_of(stored)
    end
end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
for _, expired in ipairs(redis.call('ZRANGEBYSCORE', order, '-inf', now - 1000 * ttl)) do
    redis.call('ZREM', order, expired)
    bytes = bytes - cost_of(expired)
end
if redis.call('ZREM', order, member) == 1 then bytes = bytes - cost end
local ages = {}
while bytes + cost > most do
    local oldest, stored_at = unpack(redis.call('ZPOPMIN', order))
    if not oldest then
        bytes = 0
        break
    end
    redis.call('UNLINK', prefix .. string.match(oldest, ':(.*)'))
    redis.call('INCR', evictions)
    table.insert(ages, math.floor((now - tonumber(stored_at)) / 1000))
    bytes = bytes - cost_of(oldest)
end
redis.call('SET', picture, value, 'PX', ttl)
redis.call('ZADD', order, now, member)
redis.call('PEXPIRE', order, ttl)
bytes = bytes + cost
redis.call('SET', sum, string.format('%.0f', bytes), 'PX', ttl)
return {redis.call('ZCARD', order), bytes, tonumber(redis.call('GET', evictions) or '0'), ages}
"""


class RedisImageStore:
    """Stores at most `max_bytes` of pictures in Redis, each for `ttl` seconds.

    The oldest picture is evicted first. A request waits for Redis at most `TIMEOUT_SECONDS`. After
    a failure, requests skip Redis during a pause; then one request at a time asks it. Each further
    failure doubles the pause.

    Args:
        url: address in redis-py's form: `redis://`, `rediss://` or `unix://`.
        name: name of the model; replicas of other models do not see its pictures.
        failed: called for each picture that could not be stored or looked up.
        on_evicted: called with the age of each early evicted picture, in seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        ttl: float,
        max_bytes: int,
        failed: Callable[[], object],
        on_evicted: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from redis.asyncio import Redis  # noqa: PLC0415  optional: the settings have checked for it

        self._redis = Redis.from_url(
            url, socket_timeout=TIMEOUT_SECONDS, socket_connect_timeout=TIMEOUT_SECONDS
        )
        # The braces keep all keys of a name on one node of a cluster.
        self._prefix = f"{{vitserve:{name}}}:"
        self._ttl_milliseconds = math.ceil(1000 * ttl)
        self._max_bytes = max_bytes
        self._failed = failed
        self._on_evicted = on_evicted
        self._clock = clock
        self._paused_until = -math.inf
        self._pause_seconds = 0.0
        self._is_probing = False
        self._put = self._redis.register_script(_PUT)
        self._usage = StoreUsage()

    async def put(self, picture: ModelInput, image_id: str) -> bool:
        """Store a picture; see `ImageStore.put`."""
        pixels = picture.pixels
        value = _HEADER.pack(*pixels.shape, *picture.region) + pixels.tobytes()
        cost = len(value) + _OVERHEAD_BYTES
        if self._ttl_milliseconds == 0 or cost > self._max_bytes:
            return False
        names = ("order-by-age", f"picture:{image_id}", "evictions", "bytes")
        keys = [f"{self._prefix}{name}" for name in names]
        limits = (self._ttl_milliseconds, cost, self._max_bytes)

        async def store() -> bool:
            answer = await self._put(keys, [image_id, value, *limits])
            pictures, size, evicted, ages_in_milliseconds = answer
            self._usage = StoreUsage(int(pictures), int(size), int(evicted))
            for age in ages_in_milliseconds:
                self._on_evicted(age / 1000)
            return True

        return bool(await self._ask(store))

    async def get(self, image_id: str) -> ModelInput | None:
        """Return the picture, or None, also if Redis does not answer; see `ImageStore.get`."""
        if not _ID.fullmatch(image_id):
            return None

        async def find() -> ModelInput | None:
            value = await self._redis.get(f"{self._prefix}picture:{image_id}")
            if not isinstance(value, bytes):
                return None
            try:
                return _picture(value)
            except (struct.error, ValueError, OverflowError):
                self._failed()  # another version wrote it: Redis itself works, so no pause
                return None

        return await self._ask(find)

    def usage(self) -> StoreUsage:
        """Return the usage by all replicas, as of this process's last stored picture."""
        return self._usage

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _ask(self, question: Callable[[], Awaitable[T | None]]) -> T | None:
        """Return the answer of Redis, or None if it fails or is paused."""
        if self._is_probing or self._clock() < self._paused_until:
            self._failed()
            return None
        self._is_probing = self._pause_seconds > 0
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                answer = await question()
        except Exception as error:  # noqa: BLE001  a server that is not Redis fails in any way
            self._failed()
            self._pause(error)
            return None
        finally:
            self._is_probing = False
        self._pause_seconds = 0.0
        return answer

    def _pause(self, error: Exception) -> None:
        """Stop asking Redis for a while; log only the first of several failures."""
        if self._clock() < self._paused_until:
            return
        pause_seconds = max(2 * self._pause_seconds, _FIRST_PAUSE_SECONDS)
        self._pause_seconds = min(pause_seconds, _MAX_PAUSE_SECONDS)
        self._paused_until = self._clock() + self._pause_seconds
        logger.warning("kept pictures: Redis does not answer: %s", _printable(error))


def _picture(value: bytes) -> ModelInput:
    """Return a stored picture; raises `struct.error`, `ValueError` or `OverflowError`."""
    rows, columns, channels, *region = _HEADER.unpack_from(value)
    pixels = np.frombuffer(value, np.uint8, rows * columns * channels, _HEADER.size)
    return ModelInput(pixels.reshape(rows, columns, channels), Region(*region))


def _printable(error: Exception) -> str:
    """Return a message that may quote an answer of any length, shortened and in one line."""
    text = str(error) or type(error).__name__
    return text[:_MAX_LOGGED].encode("unicode_escape").decode("ascii")
