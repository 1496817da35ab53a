"""Features of texts: computed by the text tower on a thread of its own, each text once, beside the batches of images.

    embed()  -->  texts that are not kept  -->  requests in turn, a few texts each  -->  tower  -->  kept, newest last

So a request with many new texts delays others with new texts by a few of its own at a time, and images not at all: the
thread has a lower priority, and one core.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from service.errors import DeadlineExceeded, EngineUnavailable, InferenceFailed, QueueFull
from service.priority import lower_priority

logger = logging.getLogger(__name__)

Floats = NDArray[np.float32]

_CHUNK: Final = 16
"""Texts that the tower computes at once."""

MAX_WAITING: Final = 4000
"""Texts that wait for the tower, of all requests; more are refused with 503."""

_KEPT_BYTES: Final = 32 << 20
_TEXT_BYTES: Final = 1500
"""What a text and its place take at most, beside its feature."""


@dataclass(slots=True, eq=False)
class _Request:
    """Distinct texts that one or several callers wait for: those that are still missing, and those that are there."""

    texts: tuple[str, ...]
    missing: list[str]
    features: dict[str, Floats]
    done: asyncio.Future[None]
    callers: int = 0

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class TextFeatures:
    """Computes features of texts, for callers on one event loop.

    Args:
        tower: texts to features, float32 [N, D]; called on a thread.
        kept_bytes: memory for the features of texts that may come again, oldest out first.
    """

    def __init__(self, tower: Callable[[Sequence[str]], Floats], *, kept_bytes: int = _KEPT_BYTES) -> None:
        self._tower = tower
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[str, Floats] = OrderedDict()
        self._requests: deque[_Request] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="texts", initializer=lower_priority)

    async def embed(self, texts: Sequence[str], *, timeout: float) -> Floats:
        """Return the features of texts, float32 [N, D], which must be there within `timeout` seconds.

        Raises:
            QueueFull: too many texts wait.
            DeadlineExceeded: they were not computed in time.
            InferenceFailed: the tower failed on them.
            EngineUnavailable: the engine is closed.
        """
        distinct = tuple(dict.fromkeys(texts))
        # The pictures of one request, and callers that begin together, often wait for the same texts.
        same = (each for each in self._requests if each.texts == distinct and not each.done.done())
        request = next(same, None) or self._request(distinct)
        if request.missing:
            request.callers += 1
            try:
                async with asyncio.timeout(timeout):
                    await asyncio.shield(request.done)
            except TimeoutError:
                raise DeadlineExceeded("the text tower did not compute the texts in time") from None
            finally:
                request.callers -= 1
                if not request.callers:
                    request.done.cancel()  # of callers that left: what they still need is not computed
                    if request in self._requests:
                        self._requests.remove(request)
        return np.stack([request.features[text] for text in texts])

    def _request(self, texts: tuple[str, ...]) -> _Request:
        """Return a request for texts, which waits for its turn unless all are kept; raises `QueueFull`."""
        features = {text: self._kept[text] for text in texts if text in self._kept}
        for text in features:
            self._kept.move_to_end(text)
        missing = [text for text in texts if text not in features]
        request = _Request(texts, missing, features, asyncio.get_running_loop().create_future())
        if missing:
            waiting = sum(len(each.missing) for each in self._requests)
            if waiting + len(missing) > MAX_WAITING:
                raise QueueFull(f"{waiting} texts wait for the text tower: at most {MAX_WAITING} may")
            self._requests.append(request)
            if self._worker is None:
                self._worker = asyncio.create_task(self._work())
        return request

    def close(self) -> None:
        """Refuse what waits; a chunk that is computed ends on its thread."""
        if self._worker is not None:
            self._worker.cancel()
        for request in self._requests:
            request.fail(EngineUnavailable("the engine is closed"))
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        """Compute a chunk of each request in turn, until none is left."""
        try:
            while self._requests:
                request = self._requests.popleft()
                if not request.done.done():
                    self._requests.append(request)
                    await self._advance(request)
        finally:
            self._worker = None

    async def _advance(self, request: _Request) -> None:
        """Compute the next texts of a request that are not kept."""
        request.features |= {text: self._kept[text] for text in request.missing if text in self._kept}
        request.missing = [text for text in request.missing if text not in request.features]
        chunk = request.missing[:_CHUNK]
        if chunk:
            try:
                rows = await asyncio.get_running_loop().run_in_executor(self._thread, self._tower, chunk)
            except Exception as error:
                logger.error("the text tower failed", exc_info=error)
                request.fail(InferenceFailed("the text tower failed on these texts"))
                return
            computed = dict(zip(chunk, (row.copy() for row in rows), strict=True))
            request.features |= computed
            request.missing = request.missing[len(chunk) :]
            self._keep(computed)
        if not request.missing and not request.done.done():
            request.done.set_result(None)

    def _keep(self, computed: dict[str, Floats]) -> None:
        self._kept |= computed
        size = _TEXT_BYTES + next(iter(computed.values())).nbytes
        while len(self._kept) * size > self._kept_bytes:
            self._kept.popitem(last=False)
