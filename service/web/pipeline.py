"""The path of an image through the service: admission, body, decoding, queue, answer.

Each step is one method, so that routes read as the list of steps that they are.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.types import Message, Receive

from model.config import PreprocessConfig
from model.images.preprocess import ModelInput, model_input
from model.prediction import MapRequest
from service.engine.base import Engine
from service.engine.messages import InferenceRequest, InferenceResult, ModelInfo
from service.errors import (
    ClientDisconnected,
    DeadlineExceeded,
    EngineUnavailable,
    MissingImage,
    QueueFull,
    RequestTimeout,
    UploadTooLarge,
)
from service.metrics.metrics import Metrics
from service.settings import Settings
from service.web.admission import Limiter, Permit
from service.web.connections import CRAWLS
from service.web.early_refusal import RefusedHeads
from service.web.image_store import SharedPictures
from service.web.lanes import Control, Deadline, Lane, PictureTooBig
from service.web.lifecycle import Lifecycle
from service.web.middleware import request_context
from service.web.receiving import Body, Receiving
from service.web.upload import UploadedFile, UploadLimits, read_files, read_whole

T = TypeVar("T")

_LATE_SECONDS = 0.5
"""Nobody waits longer than a second more than the request's time; what is left is for the answer's way."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A picture as the model sees it, and the seconds that decoding took."""

    picture: ModelInput
    seconds: float


BIG_PICTURE = 10_000_000
"""Cost of decoding, in pixels of an 8-bit RGB PNG, beyond which a picture is a big one: 0.2 s of a thread."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The threads that decode small pictures and big ones, and those that draw maps."""

    small: Lane
    big: Lane
    drawing: Lane

    @classmethod
    def of(cls, settings: Settings) -> Lanes:
        """Return the lanes of one process; big pictures have half as many threads, beside those of the small ones."""
        threads = settings.decode_threads or -(-min(os.cpu_count() or 1, 16) // settings.workers)
        return cls(
            small=Lane("decode", threads, max_cost=BIG_PICTURE),
            big=Lane("decode-big", max(1, threads // 2), background=True),
            drawing=Lane("drawing", 1, capacity=settings.max_drawings, background=True),
        )

    def close(self) -> None:
        """Drop what waits on all threads and take nothing more."""
        for lane in (self.small, self.big, self.drawing):
            lane.close()


@dataclass(frozen=True, slots=True)
class Upload:
    """What a request holds: the counted bytes of its body, and its places, none before the body is here."""

    body: Body
    permit: Permit


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Everything a request needs on its way; `clock` gives monotonic seconds."""

    settings: Settings
    engine: Engine
    metrics: Metrics
    limiter: Limiter
    receiving: Receiving
    pictures: SharedPictures
    lifecycle: Lifecycle
    lanes: Lanes
    clock: Callable[[], float] = time.monotonic
    refused_heads: RefusedHeads = field(default_factory=RefusedHeads)

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

    def check_room(self) -> None:
        """Raise what `admit` would raise, and take no place.

        Bodies that have just begun to arrive will take places. Without counting them, many callers would be let in at
        each place that becomes free, and all but one refused when their bodies are here. Such bodies keep at most half
        of the places, as a caller can begin one and never end it.
        """
        self.lifecycle.check()
        self.model()
        self.limiter.check()
        self.limiter.check(1 + self.receiving.newcomers(self.limiter.capacity // 2))

    @contextmanager
    def admit_upload(self, request: Request) -> Iterator[Upload]:
        """Admit a request whose body is still to come, until the context ends; raises as `admit`.

        A place must be free, but the request takes its places only when its body is here.
        """
        try:
            self.check_room()
        except QueueFull:
            self.refused_heads.remember(request.scope, request_context(request.scope).key_name)
            raise
        with self.receiving.body() as body, Permit(self.limiter) as permit:
            yield Upload(body, permit)

    def deadline(self, request: Request) -> Deadline:
        """Return when this request's time is up, counted from its head."""
        return Deadline(request_context(request.scope).started + self.settings.request_timeout, self.clock)

    async def read(self, request: Request, upload: Upload, *, files: int = 1) -> list[UploadedFile]:
        """Return the files in the body, at most `files`, and take a place for each.

        Raises:
            RequestTimeout: the body did not arrive in time, or crawled while its room was wanted.
            QueueFull: there are not as many places as files.
            ReceivingFull: there is no memory for the body.
            ServiceError: see `service.web.upload.read_files`.
        """
        limits = UploadLimits(self.settings.max_upload_bytes, self.settings.max_request_bytes, files)
        numbers = itertools.count(2)

        def read(receive: Receive) -> Awaitable[list[UploadedFile]]:
            return read_files(request.headers, receive, limits, lambda: self.limiter.check(next(numbers)))

        uploaded = await self._receive(request, upload, read)
        upload.permit.extend(len(uploaded))
        return uploaded

    async def read_body(self, request: Request, upload: Upload) -> bytearray:
        """Return the whole body, which is of another form than pictures; raises as `read`, and takes no place."""
        limit = self.settings.max_request_bytes
        return await self._receive(request, upload, lambda receive: read_whole(request.headers, receive, limit))

    async def _receive(self, request: Request, upload: Upload, read: Callable[[Receive], Awaitable[T]]) -> T:
        """Return what `read` makes of the body, whose bytes and time are bounded."""
        started = self.clock()
        request.scope[CRAWLS] = partial(self.receiving.crawls, upload.body)

        def give_way() -> None:
            if not time_limit.expired():
                time_limit.reschedule(0.0)

        async def receive() -> Message:
            message = await request.receive()
            self.receiving.add(upload.body, len(message.get("body", b"")))
            return message

        try:
            async with asyncio.timeout(self.deadline(request).remaining()) as time_limit:
                with self.receiving.arriving(upload.body, give_way):
                    found = await read(receive)
        except TimeoutError:
            if upload.body.gave_way:
                raise RequestTimeout("the body came too slowly while others waited for its room") from None
            raise RequestTimeout(f"the body did not arrive within {self.settings.request_timeout:g} s") from None
        self.metrics.stages["read"].observe(self.clock() - started)
        return found

    async def read_one(self, request: Request, upload: Upload) -> bytearray:
        """Return the bytes of the only file in the body; raises what `read` raises, and `UploadTooLarge`."""
        [file] = await self.read(request, upload)
        if isinstance(file, UploadTooLarge):
            raise file
        return file

    async def decode(self, data: bytearray, deadline: Deadline) -> Decoded:
        """Decode a file to one picture of the model's size, on a decode thread.

        Raises:
            ImageError: see `model.images.preprocess.preprocess`.
            MissingImage: there are no bytes.
            DeadlineExceeded: the time was up before the picture was decoded.
        """
        if not data:
            raise MissingImage("the picture is empty")
        work = partial(self._decode, data, self.model().preprocess)
        try:
            decoded = await self.lanes.small.run(work, deadline)
        except PictureTooBig:
            decoded = await self.lanes.big.run(work, deadline)
        self.metrics.stages["decode"].observe(decoded.seconds)
        return decoded

    def _decode(self, data: bytearray, config: PreprocessConfig, control: Control) -> Decoded:
        started = time.perf_counter()
        bounds = self.settings
        picture = model_input(
            data, config, max_pixels=bounds.max_image_pixels, scaled_decode=bounds.scaled_decode, control=control
        )
        return Decoded(picture, time.perf_counter() - started)

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
