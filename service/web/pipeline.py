"""The path of an image through the service: admission, body, decoding, queue, answer.

Each step is one method, so that routes read as the list of steps that they are.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.types import Message, Receive

from model.config import PreprocessConfig
from model.errors import ImageError
from model.images.formats import UnboundedWork
from model.images.preprocess import model_input
from model.prediction import RequestedOutputs
from service.engine.base import Engine
from service.engine.messages import InferenceRequest, InferenceResult, ModelInfo
from service.engine.swapping import Generation, Swappable
from service.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    InferenceFailed,
    MissingImage,
    RequestTimeout,
    ServiceError,
    UploadTooLarge,
)
from service.http.exchange import exchange_of
from service.http.lifecycle import Lifecycle
from service.metrics.metrics import Metrics
from service.settings import Settings
from service.web.admission import Limiter, Permit
from service.web.decoders import Decoded, Decoders
from service.web.image_store import SharedPictures
from service.web.lanes import Deadline, Lane
from service.web.middleware import request_context
from service.web.receiving import Body, Receiving
from service.web.upload import UploadedFile, UploadLimits, read_files, read_whole

if TYPE_CHECKING:
    from service.tracing.request_spans import RequestTracer

T = TypeVar("T")

_LATE_SECONDS = 0.5
"""Nobody waits longer than a second more than the request's time; what is left is for the answer's way."""

MAX_DRAWINGS = 64
"""Attention maps that wait to be drawn, or are being drawn, in each process; more are refused with 503."""


class Lanes:
    """What works beside the event loop of one process: threads of each kind, and the processes that decode pictures."""

    def __init__(self, settings: Settings, on_restart: Callable[[], object] = lambda: None) -> None:
        threads = settings.decode_threads or -(-min(os.cpu_count() or 1, 16) // settings.workers)
        self.pictures = Lane("decode", threads)
        self.documents = Lane("documents", 1, background=True)
        self.drawing = Lane("drawing", 1, capacity=MAX_DRAWINGS, background=True)
        self.decoders = Decoders(settings, quick=2 if settings.workers == 1 else 1, on_restart=on_restart)

    def check(self) -> None:
        """Raise `EngineUnavailable` if a thread does not come back from its work."""
        for lane in (self.pictures, self.documents, self.drawing):
            lane.check()

    def close(self) -> None:
        """Drop what waits, take nothing more, and end the processes."""
        for lane in (self.pictures, self.documents, self.drawing):
            lane.close()
        self.decoders.close()


@dataclass(frozen=True, slots=True)
class Upload:
    """What a request holds: the counted bytes of its body, and its places, none before the body is here."""

    body: Body
    permit: Permit


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Everything a request needs on its way; `clock` gives monotonic seconds.

    Attributes:
        generation: the model that the request belongs to.
    """

    generation: Generation
    settings: Settings
    metrics: Metrics
    limiter: Limiter
    receiving: Receiving
    pictures: SharedPictures
    lifecycle: Lifecycle
    lanes: Lanes
    clock: Callable[[], float] = time.monotonic
    tracer: RequestTracer | None = None

    @property
    def engine(self) -> Engine:
        """Return the engine of the request's model."""
        return self.generation.engine

    def model(self) -> ModelInfo:
        """Return the description of the model; raises `EngineUnavailable` if no model is ready."""
        info = self.engine.info
        if info is None or not self.engine.ready:
            raise EngineUnavailable(self.engine.status.reason)
        return info

    def check_ready(self) -> None:
        """Raise `Draining` or `EngineUnavailable` if the service takes no requests, or should get none."""
        self.lifecycle.check()
        self.model()
        self.lanes.check()

    def admit(self) -> AbstractContextManager[Permit]:
        """Take a place in the service before any work; raises `Draining`, `EngineUnavailable` or `QueueFull`."""
        self.lifecycle.check()
        self.model()
        return self._held(self.limiter.permit())

    @contextmanager
    def _held(self, permit: Permit) -> Iterator[Permit]:
        with permit, self._counted():
            yield permit

    def _counted(self) -> AbstractContextManager[None]:
        """Keep the request's model until the context ends."""
        return self.generation.request()

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
        self.check_room()
        with self.upload() as upload:
            exchange_of(request.scope).arriving = upload.body
            yield upload

    @contextmanager
    def upload(self) -> Iterator[Upload]:
        """Return what a request holds whose body is still to come, until the context ends."""
        with self.receiving.body() as body, Permit(self.limiter) as permit, self._counted():
            yield Upload(body, permit)

    def deadline(self, request: Request) -> Deadline:
        """Return when this request's time is up, counted from its head."""
        return self.deadline_of(request_context(request.scope).started)

    def deadline_of(self, started: float) -> Deadline:
        """Return when the time of a request is up whose head came at this reading of the clock."""
        return Deadline(started + self.settings.request_timeout, self.clock)

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

        uploaded = await self.receive(request.receive, upload, self.deadline(request), read)
        upload.permit.extend(len(uploaded))
        return uploaded

    async def read_body(self, request: Request, upload: Upload) -> bytearray:
        """Return the whole body, which is of another form than pictures; raises as `read`, and takes no place."""
        limit, deadline = self.settings.max_request_bytes, self.deadline(request)
        return await self.receive(
            request.receive, upload, deadline, lambda receive: read_whole(request.headers, receive, limit)
        )

    async def receive(
        self, source: Receive, upload: Upload, deadline: Deadline, read: Callable[[Receive], Awaitable[T]]
    ) -> T:
        """Return what `read` makes of the body that comes from `source`; its bytes and time are bounded."""
        started = self.clock()
        try:
            found = await self._receive_bounded(source, upload, deadline, read)
        except ServiceError as error:
            self.stage_failed("read", self.clock() - started, error)
            raise
        self.stage_ended("read", self.clock() - started)
        return found

    async def _receive_bounded(
        self, source: Receive, upload: Upload, deadline: Deadline, read: Callable[[Receive], Awaitable[T]]
    ) -> T:
        def give_way() -> None:
            if not time_limit.expired():
                time_limit.reschedule(0.0)

        async def receive() -> Message:
            message = await source()
            self.receiving.add(upload.body, len(message.get("body", b"")))
            return message

        try:
            async with asyncio.timeout(deadline.remaining()) as time_limit:
                with self.receiving.arriving(upload.body, give_way):
                    return await read(receive)
        except TimeoutError:
            if upload.body.gave_way:
                raise RequestTimeout("the body came too slowly while others waited for its room") from None
            raise RequestTimeout(f"the body did not arrive within {self.settings.request_timeout:g} s") from None

    async def read_one(self, request: Request, upload: Upload) -> bytearray:
        """Return the bytes of the only file in the body; raises what `read` raises, and `UploadTooLarge`."""
        [file] = await self.read(request, upload)
        if isinstance(file, UploadTooLarge):
            raise file
        return file

    async def decode(self, data: bytearray, deadline: Deadline) -> Decoded:
        """Decode a file to one picture of the model's size, on a decode thread or in a process of its own.

        Raises:
            ImageError: see `model.images.preprocess.preprocess`.
            MissingImage: there are no bytes.
            DeadlineExceeded: the time was up before the picture was decoded.
        """
        if not data:
            raise MissingImage("the picture is empty")
        config = self.model().preprocess
        remaining = deadline.remaining()
        try:
            decoded = await self.lanes.pictures.run(partial(self._decode_bounded, data, config), deadline)
            if decoded is None:
                decoded = await self.lanes.decoders.model_input(data, config, deadline)
        except (ImageError, ServiceError) as error:
            self.stage_failed("decode", remaining - deadline.remaining(), error)
            raise
        self.stage_ended("decode", decoded.seconds)
        return decoded

    def _decode_bounded(self, data: bytearray, config: PreprocessConfig) -> Decoded | None:
        """Return the picture in a file whose structure bounds the work; None for all others."""
        started = time.perf_counter()
        bounds = self.settings
        try:
            picture = model_input(
                data, config, max_pixels=bounds.max_image_pixels, scaled_decode=bounds.scaled_decode, bounded=True
            )
        except UnboundedWork:
            return None
        return Decoded(picture, time.perf_counter() - started)

    async def classify(
        self, data: bytearray, deadline: Deadline, requested: RequestedOutputs
    ) -> tuple[Decoded, InferenceResult]:
        """Return a file's picture as the model saw it, and the model's answer; raises as `decode` and `infer` do."""
        decoded = await self.decode(data, deadline)
        return decoded, await self.infer(decoded.picture.pixels, deadline, requested)

    async def infer(
        self, pixels: NDArray[np.uint8], deadline: Deadline, requested: RequestedOutputs
    ) -> InferenceResult:
        """Return the model's answer to one picture, uint8 [H, W, C]; raises as `Engine.infer`.

        A picture that was launched in time may be answered late, up to `_LATE_SECONDS`: an engine may never answer.
        """
        traceparent = None if self.tracer is None else self.tracer.traceparent()
        request = InferenceRequest(pixels, requested, traceparent)
        remaining = deadline.remaining()
        try:
            result = await self._infer(request, remaining)
        except ServiceError as error:
            stage = "inference" if isinstance(error, InferenceFailed) else "queue"
            self.stage_failed(stage, remaining - deadline.remaining(), error)
            raise
        self.metrics.stages["queue"].observe(result.queue_seconds)
        self.metrics.stages["inference"].observe(result.inference_seconds)
        if self.tracer is not None:
            self.tracer.computed(result)
        return result

    async def _infer(self, request: InferenceRequest, remaining: float) -> InferenceResult:
        try:
            async with asyncio.timeout(remaining + _LATE_SECONDS):
                return await self.engine.infer(request, timeout=remaining)
        except TimeoutError:
            raise DeadlineExceeded("the model did not answer in time") from None

    def stage_ended(self, stage: str, seconds: float) -> None:
        """Count the seconds of a stage that an image has behind it."""
        self.metrics.stages[stage].observe(seconds)
        if self.tracer is not None:
            self.tracer.stage(stage, seconds)

    def stage_failed(self, stage: str, seconds: float, error: Exception) -> None:
        """Tell the tracer of a stage that ended in an error."""
        if self.tracer is not None:
            self.tracer.failed(stage, seconds, error)


class Pipelines:
    """The pipeline of the model that is current: one for each, as making it takes 20 µs.

    Args:
        make: makes the pipeline of a generation.
    """

    def __init__(self, engine: Swappable, make: Callable[[Generation], Pipeline]) -> None:
        self.engine = engine
        self._make = make
        self._current = make(engine.current)

    def current(self) -> Pipeline:
        """Return the pipeline of the model that is current now, which stays the same for a request on its whole way.

        The model may be gone as soon as another took over and no request is admitted (`admit`, `admit_upload`).
        """
        if self._current.generation is not self.engine.current:
            self._current = self._make(self.engine.current)
        return self._current


def pipeline_of(request: Request) -> Pipeline:
    """Return the pipeline of the application that the request came to, with the model that is current now."""
    return cast(Pipelines, request.app.state.pipelines).current()
