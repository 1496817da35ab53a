"""Features of texts, computed by the text tower on a thread of its own, each text once.

The tower computes 16 texts at a time, first in, first out. After these, a request with more new
texts goes back to the end of the queue, so it delays another request by 16 texts at most. Callers
take turns where requests are admitted: see docs/decisions/fairness.md.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from service.errors import DeadlineExceeded, EngineUnavailable, InferenceFailed

logger = logging.getLogger(__name__)

Floats = NDArray[np.float32]

# From texts to features, float32 [N, D]; called on a thread.
Tower = Callable[[Sequence[str]], Floats]

# Number of texts that the tower computes at once.
_CHUNK: Final = 16

# Memory for features of texts that may come again; the oldest are evicted.
_CACHE_BYTES: Final = 32 << 20

# Largest memory of a text and its cache entry, without the feature.
_TEXT_BYTES: Final = 1500


class TextFeatures:
    """Computes features of texts, for requests on one event loop."""

    def __init__(self) -> None:
        self._cache: OrderedDict[str, Floats] = OrderedDict()
        self._tower_lock = asyncio.Lock()  # first in, first out
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="texts")

    async def embed(self, texts: Sequence[str], tower: Tower, *, timeout: float) -> Floats:
        """Return the features of texts, float32 [N, D], within `timeout` seconds.

        Raises:
            DeadlineExceeded: the tower did not compute them in time.
            InferenceFailed: the tower failed on them.
            EngineUnavailable: the engine is closed.
        """
        features: dict[str, Floats] = {}
        missing = self._take(dict.fromkeys(texts), features)
        try:
            async with asyncio.timeout(timeout):
                for start in range(0, len(missing), _CHUNK):
                    async with self._tower_lock:
                        # Meanwhile some of these texts may be computed, for other requests.
                        new = self._take(missing[start : start + _CHUNK], features)
                        if new:
                            features |= await self._compute(new, tower)
        except TimeoutError:
            raise DeadlineExceeded("the text tower did not compute the texts in time") from None
        return np.stack([features[text] for text in texts])

    def close(self) -> None:
        """Refuse waiting texts; the thread finishes the texts that it computes."""
        self._closed = True
        self._thread.shutdown(wait=False)

    def _take(self, texts: Iterable[str], features: dict[str, Floats]) -> list[str]:
        """Add the cached features, which become the newest, and return the other texts."""
        missing = [text for text in texts if text not in self._cache]
        for text in set(texts).difference(missing):
            features[text] = self._cache[text]
            self._cache.move_to_end(text)
        return missing

    async def _compute(self, texts: Sequence[str], tower: Tower) -> dict[str, Floats]:
        if self._closed:
            raise EngineUnavailable("the engine is closed")
        try:
            rows = await asyncio.get_running_loop().run_in_executor(self._thread, tower, texts)
        except Exception as error:
            logger.error("the text tower failed", exc_info=error)
            raise InferenceFailed("the text tower failed on these texts") from None
        computed = {text: row.copy() for text, row in zip(texts, rows, strict=True)}
        self._cache |= computed
        while len(self._cache) * (_TEXT_BYTES + rows[0].nbytes) > _CACHE_BYTES:
            self._cache.popitem(last=False)
        return computed
