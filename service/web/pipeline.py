"""One image's way through the service: place, body, decoding, queue, answer.

Each step is one method, so that routes read as the list of steps that they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.types import Receive

from model.images.preprocess import preprocess
from model.prediction import MapRequest
from service.engine.base import Engine
from service.engine.messages import InferenceRequest, InferenceResult, ModelInfo
from service.errors import (
    ClientDisconnected,
    DeadlineExceeded,
    EngineUnavailable,
    MissingImage,
    RequestTimeout,
    UploadTooLarge,
)
from service.metrics.metrics import Metrics
from service.settings import Settings
from service.web.admission import Limiter, Permit
from service.web.image_store import ImageStore
from service.web.lifecycle import Lifecycle
from service.web.upload import Limits, Picture, read_pictures

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a request's time is up, in the event loop's (monotonic) seconds."""

    at: float

    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.at - time.monotonic())

    def check(self) -> None:
        """Stop work that nobody may use any more.

        Raises:
            DeadlineExceeded: the time is up.
        """
        if self.remaining() == 0.0:
            raise DeadlineExceeded("the time was up before the image was decoded")


@dataclass(frozen=True, slots=True)
class Decoded:
    """A picture as the model sees it, and the seconds that decoding took."""

    pixels: NDArray[np.uint8]
    seconds: float


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Everything a request needs on its way; built once by `service.web.app`."""

    settings: Settings
    engine: Engine
    metrics: Metrics
    places: Limiter
    recent: ImageStore
    lifecycle: Lifecycle
    pool: ThreadPoolExecutor

    def model(self) -> ModelInfo:
        """What is served.

        Raises:
            EngineUnavailable: no model is ready.
        """
        info = self.engine.info
        if info is None or not self.engine.ready:
            raise EngineUnavailable(self.engine.status.reason)
        return info

    def admit(self) -> Permit:
        """A place in the service, before any work; use it as a context manager.

        Raises:
            Draining, EngineUnavailable, QueueFull: no place, and why.
        """
        self.lifecycle.check()
        self.model()
        return self.places.reserve()

    def deadline(self, request: Request) -> Deadline:
        """When this request's time is up, counted from its head."""
        return Deadline(request.scope["vit.started"] + self.settings.request_timeout)

    async def read(self, request: Request, permit: Permit, *, files: int = 1) -> list[Picture]:
        """The pictures in the body; each beyond the first takes one more place.

        Raises:
            RequestTimeout: the body did not arrive in time.
            ServiceError: see `service.web.upload.read_pictures`.
        """
        started = time.monotonic()
        limits = Limits(self.settings.max_upload_bytes, self.settings.max_request_bytes, files)
        try:
            async with asyncio.timeout(self.deadline(request).remaining()):
                pictures = await read_pictures(request.headers, request.receive, limits, permit.extend)
        except TimeoutError:
            raise RequestTimeout(f"the body did not arrive within {self.settings.request_timeout:g} s") from None
        self.metrics.stages["read"].observe(time.monotonic() - started)
        return pictures

    async def read_one(self, request: Request, permit: Permit) -> bytearray:
        """The only picture in the body.

        Raises:
            UploadTooLarge: it is too large; and as `read`.
        """
        [picture] = await self.read(request, permit)
        if isinstance(picture, UploadTooLarge):
            raise picture
        return picture

    async def decode(self, data: bytearray, deadline: Deadline) -> Decoded:
        """Bytes to one picture of the model's size, on a decode thread.

        Raises:
            ImageError: see `model.images.preprocess.preprocess`.
            MissingImage: there are no bytes.
            DeadlineExceeded: the time was up before a decode thread was free.
        """
        if not data:
            raise MissingImage("the picture is empty")
        info = self.model()

        def work() -> Decoded:
            deadline.check()
            started = time.perf_counter()
            pixels = preprocess(
                data,
                info.preprocess,
                max_pixels=self.settings.max_image_pixels,
                scaled_decode=self.settings.scaled_decode,
            )
            return Decoded(pixels, time.perf_counter() - started)

        decoded = await self.in_thread(work)
        self.metrics.stages["decode"].observe(decoded.seconds)
        return decoded

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run CPU work beside the event loop, on the decode threads.

        When the caller is cancelled, work that no thread has begun is skipped; but the call ends only after the
        thread has let go of the picture, so that its place in the service is not given to another before.
        """
        abandoned = False

        def unless_abandoned() -> T:
            if abandoned:
                raise ClientDisconnected("the caller went away")
            return work()

        future = asyncio.get_running_loop().run_in_executor(self.pool, unless_abandoned)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            abandoned = True
            await asyncio.wait((future,))
            if not future.cancelled():
                future.exception()  # seen, though nobody asks for it any more
            raise

    async def infer(
        self, pixels: NDArray[np.uint8], deadline: Deadline, *, top_k: int, map_request: MapRequest | None
    ) -> InferenceResult:
        """The model's answer.

        Raises:
            DeadlineExceeded, InferenceFailed, EngineUnavailable, QueueFull: see `Engine.infer`.
        """
        request = InferenceRequest(pixels, top_k, map_request)
        result = await self.engine.infer(request, timeout=deadline.remaining())
        self.metrics.stages["queue"].observe(result.queue_seconds)
        self.metrics.stages["inference"].observe(result.inference_seconds)
        return result


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`, and cancel it if the caller goes away meanwhile.

    Args:
        receive: ASGI channel of a request whose body has been read to its end.
        work: what the caller waits for.

    Raises:
        ClientDisconnected: the caller went away first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        watcher.result()  # raises what else may become of a request's body
        raise ClientDisconnected("the caller went away")
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            # Its places are given back only after it has let go of what it holds.
            await asyncio.wait((task,))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
