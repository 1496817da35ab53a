"""Features of texts: computed by the text tower on a thread of its own, each text once, beside the batches of images.

Requests take turns, a few texts each: one with many new texts delays others by a few of its own at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from service.errors import DeadlineExceeded, EngineUnavailable, InferenceFailed, QueueFull

logger = logging.getLogger(__name__)

Floats = NDArray[np.float32]

_CHUNK: Final = 16
"""Texts that the tower computes at once."""

MAX_WAITING: Final = 4000
"""Texts that wait for the tower, of all requests; more are refused with 503."""

_CACHE_BYTES: Final = 32 << 20
_TEXT_BYTES: Final = 1500
"""What a text and its place take at most, beside its feature."""


class TextFeatures:
    """Computes features of texts, for callers on one event loop.

    Args:
        tower: texts to features, float32 [N, D]; called on a thread.
        cache_bytes: memory for the features of texts that may come again, oldest out first.
    """

    def __init__(self, tower: Callable[[Sequence[str]], Floats], *, cache_bytes: int = _CACHE_BYTES) -> None:
        self._tower = tower
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[str, Floats] = OrderedDict()
        self._waiting: Counter[str] = Counter()  # with the number of requests, which often wait for the same
        self._turn = asyncio.Lock()  # first come, first served
        self._closed = False
        self._limits: set[asyncio.Timeout] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="texts")

    async def embed(self, texts: Sequence[str], *, timeout: float) -> Floats:
        """Return the features of texts, float32 [N, D], which must be there within `timeout` seconds.

        Raises:
            QueueFull: too many texts wait.
            DeadlineExceeded: they were not computed in time.
            InferenceFailed: the tower failed on them.
            EngineUnavailable: the engine is closed.
        """
        if self._closed:
            raise EngineUnavailable("the engine is closed")
        features = self._cached(dict.fromkeys(texts))
        missing = [text for text in dict.fromkeys(texts) if text not in features]
        waiting = len(self._waiting)
        if waiting + sum(text not in self._waiting for text in missing) > MAX_WAITING:
            raise QueueFull(f"{waiting} texts wait for the text tower: at most {MAX_WAITING} may")
        self._waiting.update(missing)
        limit = asyncio.timeout(timeout)
        self._limits.add(limit)
        try:
            async with limit:
                for first in range(0, len(missing), _CHUNK):
                    async with self._turn:
                        features |= await self._compute(missing[first : first + _CHUNK])
        except TimeoutError:
            if self._closed:
                raise EngineUnavailable("the engine is closed") from None
            raise DeadlineExceeded("the text tower did not compute the texts in time") from None
        finally:
            self._limits.discard(limit)
            self._waiting -= Counter(missing)
        return np.stack([features[text] for text in texts])

    def close(self) -> None:
        """Refuse what waits; a chunk that is computed ends on its thread."""
        self._closed = True
        for limit in self._limits:
            limit.reschedule(0)
        self._thread.shutdown(wait=False)

    async def _compute(self, texts: Sequence[str]) -> dict[str, Floats]:
        """Return the features of a few texts, of which others may have asked for some meanwhile."""
        features = self._cached(texts)
        missing = [text for text in texts if text not in features]
        if missing:
            try:
                rows = await asyncio.get_running_loop().run_in_executor(self._thread, self._tower, missing)
            except Exception as error:
                logger.error("the text tower failed", exc_info=error)
                raise InferenceFailed("the text tower failed on these texts") from None
            computed = {text: row.copy() for text, row in zip(missing, rows, strict=True)}
            features |= computed
            self._cache |= computed
            while len(self._cache) * (_TEXT_BYTES + rows[0].nbytes) > self._cache_bytes:
                self._cache.popitem(last=False)
        return features

    def _cached(self, texts: Iterable[str]) -> dict[str, Floats]:
        """Return the features that are there, which are the newest from now on."""
        found = {text: self._cache[text] for text in texts if text in self._cache}
        for text in found:
            self._cache.move_to_end(text)
        return found
