"""The path of an image through the service: admission, body, decoding, queue, answer.

Each step is one method, so that routes read as the list of steps that they are.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.types import Receive

from model.config import PreprocessConfig
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
from service.web.middleware import request_context
from service.web.upload import UploadedFile, UploadLimits, read_files

T = TypeVar("T")

_LATE_SECONDS = 0.5
"""Nobody waits longer than a second more than the request's time; what is left is for the answer's way."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The reading `at` of the monotonic `clock`, seconds, at which a request's time is up."""

    at: float
    clock: Callable[[], float] = time.monotonic

    def remaining(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self.at - self.clock())


@dataclass(frozen=True, slots=True)
class Decoded:
    """A picture as the model sees it, uint8 [H, W, C] of its input size, and the seconds that decoding took."""

    pixels: NDArray[np.uint8]
    seconds: float


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Everything a request needs on its way: `pool` are the decode threads, `clock` gives monotonic seconds."""

    settings: Settings
    engine: Engine
    metrics: Metrics
    limiter: Limiter
    image_store: ImageStore
    lifecycle: Lifecycle
    pool: ThreadPoolExecutor
    clock: Callable[[], float] = time.monotonic

    def model(self) -> ModelInfo:
        """Return the description of the model; raises `EngineUnavailable` if no model is ready."""
        info = self.engine.info
        if info is None or not self.engine.ready:
            raise EngineUnavailable(self.engine.status.reason)
        return info

    def admit(self) -> Permit:
        """Take a place in the service before any work; raises `Draining`, `EngineUnavailable` or `QueueFull`."""
        self.lifecycle.check()
        self.model()
        return self.limiter.permit()

    def deadline(self, request: Request) -> Deadline:
        """Return when this request's time is up, counted from its head."""
        return Deadline(request_context(request.scope).started + self.settings.request_timeout, self.clock)

    async def read(self, request: Request, permit: Permit, *, files: int = 1) -> list[UploadedFile]:
        """Return the files in the body, at most `files`; each beyond the first takes one more place.

        Raises:
            RequestTimeout: the body did not arrive in time.
            ServiceError: see `service.web.upload.read_files`.
        """
        started = self.clock()
        limits = UploadLimits(self.settings.max_upload_bytes, self.settings.max_request_bytes, files)
        try:
            async with asyncio.timeout(self.deadline(request).remaining()):
                uploaded = await read_files(request.headers, request.receive, limits, permit.extend)
        except TimeoutError:
            raise RequestTimeout(f"the body did not arrive within {self.settings.request_timeout:g} s") from None
        self.metrics.stages["read"].observe(self.clock() - started)
        return uploaded

    async def read_one(self, request: Request, permit: Permit) -> bytearray:
        """Return the bytes of the only file in the body; raises what `read` raises, and `UploadTooLarge`."""
        [file] = await self.read(request, permit)
        if isinstance(file, UploadTooLarge):
            raise file
        return file

    async def decode(self, data: bytearray, deadline: Deadline) -> Decoded:
        """Decode a file to one picture of the model's size, on a decode thread.

        Raises:
            ImageError: see `model.images.preprocess.preprocess`.
            MissingImage: there are no bytes.
            DeadlineExceeded: the time was up before a decode thread was free.
        """
        if not data:
            raise MissingImage("the picture is empty")
        decoded = await self.in_thread(partial(self._decode, data, self.model().preprocess, deadline))
        self.metrics.stages["decode"].observe(decoded.seconds)
        return decoded

    def _decode(self, data: bytearray, config: PreprocessConfig, deadline: Deadline) -> Decoded:
        if deadline.remaining() == 0.0:
            raise DeadlineExceeded("the time was up before the image was decoded")
        started = time.perf_counter()
        bounds = self.settings
        pixels = preprocess(data, config, max_pixels=bounds.max_image_pixels, scaled_decode=bounds.scaled_decode)
        return Decoded(pixels, time.perf_counter() - started)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run CPU work beside the event loop, on the decode threads.

        When the caller is cancelled, work that no thread has begun is skipped; but the call ends only after the
        thread has let go of the picture, so that its place in the service is not given to another before.
        """
        abandoned = threading.Event()

        def work_unless_abandoned() -> T:
            if abandoned.is_set():
                raise ClientDisconnected("the caller went away")
            return work()

        future = asyncio.get_running_loop().run_in_executor(self.pool, work_unless_abandoned)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            abandoned.set()
            await asyncio.wait((future,))
            if not future.cancelled():
                future.exception()  # seen, though nobody asks for it any more
            raise

    async def infer(
        self, pixels: NDArray[np.uint8], deadline: Deadline, *, top_k: int, map_request: MapRequest | None
    ) -> InferenceResult:
        """Return the model's answer to one picture, uint8 [H, W, C]; raises as `Engine.infer`.

        A picture that was launched in time may be answered late, up to `_LATE_SECONDS`: an engine may never answer.
        """
        request = InferenceRequest(pixels, top_k, map_request)
        remaining = deadline.remaining()
        try:
            async with asyncio.timeout(remaining + _LATE_SECONDS):
                result = await self.engine.infer(request, timeout=remaining)
        except TimeoutError:
            raise DeadlineExceeded("the model did not answer in time") from None
        self.metrics.stages["queue"].observe(result.queue_seconds)
        self.metrics.stages["inference"].observe(result.inference_seconds)
        return result


def pipeline_of(request: Request) -> Pipeline:
    """Return the pipeline of the application that the request came to."""
    return cast(Pipeline, request.app.state.pipeline)


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side and return their results, in order.

    When one fails the others are cancelled, and its error is raised only after they have ended: until then they hold
    what they were given.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`; if the caller goes away meanwhile, cancel it and raise `ClientDisconnected`.

    The body that came through `receive` must have been read to its end.
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
            # Its permit is released only after it has let go of what it holds.
            await asyncio.wait((task,))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
