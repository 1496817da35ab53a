"""The path of an image through the service: admission, body, decoding, queue, answer.

Each step is one method, so that routes read as the list of steps that they are.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.types import Message, Receive

from model.config import PreprocessConfig
from model.images.formats import UnboundedWork
from model.images.preprocess import model_input
from model.outputs import RequestedOutputs
from model.zero_shot import of_image
from service.engine.base import Engine
from service.engine.messages import InferenceRequest, InferenceResult, ModelInfo
from service.engine.swapping import Generation, Swappable
from service.errors import (
    DeadlineExceeded,
    Draining,
    EngineUnavailable,
    MissingImage,
    RequestTimeout,
    UploadTooLarge,
)
from service.http.exchange import exchange_of
from service.http.lifecycle import Lifecycle
from service.observe.metrics import Metrics
from service.settings import Settings
from service.timers import TimeLimit, Timers
from service.web.admission import Body, Limiter, Permit, Receiving
from service.web.decoders import Decoded, Decoders
from service.web.image_stores import KeptPictures
from service.web.middleware import request_context
from service.web.upload import UploadedFile, UploadLimits, read_files, read_whole
from service.web.work import Deadline, ThreadPool, all_of, unless_disconnected
from vitserve.documents import FIELD

T = TypeVar("T")

_LATE_SECONDS = 0.5
"""Nobody waits longer than a second more than the request's time; what is left is for the answer's way."""

_NO_CONTEXT = nullcontext()

MAX_DRAWINGS = 64
"""Attention maps that wait to be drawn, or are being drawn, in each process; more are refused with 503."""


class Pools:
    """The threads and the decoder processes that work beside the event loop of a process, and its timers."""

    def __init__(self, settings: Settings, on_restart: Callable[[], object] = lambda: None) -> None:
        threads = settings.decode_threads or -(-min(os.cpu_count() or 1, 16) // settings.workers)
        self.timers = Timers()
        self.pictures = ThreadPool("decode", threads)
        self.documents = ThreadPool("documents", 1, background=True)
        self.drawing = ThreadPool("drawing", 1, capacity=MAX_DRAWINGS, background=True)
        self.decoders = Decoders(settings, quick=2 if settings.workers == 1 else 1, on_restart=on_restart)

    def check(self) -> None:
        """Raise `EngineUnavailable` if a thread does not come back from its work."""
        for pool in (self.pictures, self.documents, self.drawing):
            pool.check()

    def close(self) -> None:
        """Drop what waits, take nothing more, and end the processes."""
        for pool in (self.pictures, self.documents, self.drawing):
            pool.close()
        self.decoders.close()


@dataclass(frozen=True, slots=True)
class Upload:
    """What a request holds: the counted bytes of its body, and its places, none before the body is here."""

    body: Body
    permit: Permit


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Everything that requests of one `generation` of the model need on their way; `clock` gives monotonic seconds."""

    generation: Generation
    settings: Settings
    metrics: Metrics
    limiter: Limiter
    receiving: Receiving
    pictures: KeptPictures
    lifecycle: Lifecycle
    pools: Pools
    clock: Callable[[], float] = time.monotonic

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

    def check_open(self) -> None:
        """Raise `Draining` or `EngineUnavailable` if the service takes no requests."""
        if self.lifecycle.draining:
            raise Draining("the service is about to stop: try another instance")
        self.model()

    def check_ready(self) -> None:
        """Raise `Draining` or `EngineUnavailable` if the service takes no requests, or should get none."""
        self.check_open()
        self.pools.check()

    @contextmanager
    def admit(self) -> Iterator[Permit]:
        """Hold a place and the model until the context ends; raises `Draining`, `EngineUnavailable` or `QueueFull`."""
        self.check_open()
        with self.limiter.permit() as permit, self.generation.request():
            yield permit

    def check_room(self) -> None:
        """Raise what `admit` would raise, and take no place.

        Bodies that have just begun to arrive will take places. Without counting them, many callers would be admitted
        for each free place, and most of them refused when their bodies are here. Such bodies keep at most half of the
        places, as a caller can begin a body and never end it.
        """
        self.check_open()
        self.limiter.check()
        free = self.limiter.capacity - self.limiter.taken
        if free <= self.limiter.capacity // 2:
            self.limiter.check(1 + self.receiving.newcomers(free))

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
        with self.receiving.body() as body, Permit(self.limiter) as permit, self.generation.request():
            yield Upload(body, permit)

    def deadline(self, request: Request) -> Deadline:
        """Return when this request's time is up, counted from its head."""
        return self.deadline_of(request_context(request.scope).started)

    def deadline_of(self, started: float) -> Deadline:
        """Return when the time of a request is up whose head came at this reading of the clock."""
        return Deadline(started + self.settings.request_timeout, self.clock)

    async def answer_picture(
        self, request: Request, answer: Callable[[bytearray], Awaitable[T]], fields: Collection[str] = (FIELD,)
    ) -> T:
        """Admit a request, read the only picture in its body, and return what `answer` makes of it.

        `fields` are the names that its part of a multipart form may have.

        Raises `ClientDisconnected` when the caller leaves, and what the steps raise.
        """
        with self.admit_upload(request) as upload:
            [file] = await self._read(request, upload, files=1, fields=fields)
            if isinstance(file, UploadTooLarge):
                raise file
            return await unless_disconnected(request.receive, answer(file), exchange_of(request.scope).caller_left)

    async def answer_pictures(
        self, request: Request, answer: Callable[[int, UploadedFile], Coroutine[Any, Any, T]]
    ) -> list[T]:
        """Return what `answer` makes of each picture in a body and its position; see `answer_picture`."""
        with self.admit_upload(request) as upload:
            files = await self._read(request, upload, files=self.settings.max_images_per_request)
            answers = all_of(answer(position, file) for position, file in enumerate(files))
            return await unless_disconnected(request.receive, answers)

    async def _read(
        self, request: Request, upload: Upload, *, files: int, fields: Collection[str] = (FIELD,)
    ) -> list[UploadedFile]:
        """Return the files in the body, at most `files`, and take a place for each.

        Raises `QueueFull`, and what `receive` and `service.web.upload.read_files` raise.
        """
        limits = UploadLimits(self.settings.max_upload_bytes, self.settings.max_request_bytes, files, fields)
        numbers = itertools.count(2)

        def read(receive: Receive) -> Awaitable[list[UploadedFile]]:
            return read_files(request.headers, receive, limits, lambda: self.limiter.check(next(numbers)))

        uploaded = await self.receive(request.receive, upload, self.deadline(request), read)
        upload.permit.extend(len(uploaded))
        return uploaded

    async def read_body(self, request: Request, upload: Upload, limit: int | None = None) -> bytearray:
        """Return the whole body, which is of another form than pictures; raises as `receive`, and takes no place.

        `limit` is how many bytes it may have, if not those of the settings.
        """
        read = partial(read_whole, request.headers, limit=limit or self.settings.max_request_bytes)
        return await self.receive(request.receive, upload, self.deadline(request), read)

    async def receive(
        self, source: Receive, upload: Upload, deadline: Deadline, read: Callable[[Receive], Awaitable[T]]
    ) -> T:
        """Return what `read` makes of the body that comes from `source`; its bytes and time are bounded.

        Raises:
            RequestTimeout: the body did not arrive in time, or crawled while others needed its room.
            ReceivingFull: there is no memory for the body.
        """

        async def receive() -> Message:
            message = await source()
            self.receiving.add(upload.body, len(message.get("body", b"")))
            return message

        started = self.clock()
        try:
            limit = TimeLimit(self.pools.timers, deadline.remaining())
            with limit, self.receiving.arriving(upload.body, limit.expire):
                content = await read(receive)
        except TimeoutError:
            if upload.body.gave_way:
                raise RequestTimeout("the body came too slowly while others waited for its room") from None
            raise RequestTimeout(f"the body did not arrive within {self.settings.request_timeout:g} s") from None
        self.metrics.observe_stage("read", self.clock() - started)
        return content

    async def compute(
        self, data: bytearray, deadline: Deadline, requested: RequestedOutputs
    ) -> tuple[Decoded, InferenceResult]:
        """Return the picture in a file as the model saw it, and the model's answer; raises as `decode` and `infer`.

        Pictures have their turns in the order of arrival. Those of which a map is asked need none, and those that a
        process decodes keep none: they may wait for long, and are to hold up no others.
        """
        self.model()  # else there is no engine to wait for
        if requested.map is None:
            turns = self.generation.turns
            try:
                with TimeLimit(self.pools.timers, deadline.remaining()) if turns.locked() else _NO_CONTEXT:
                    await turns.acquire()
            except TimeoutError:
                raise DeadlineExceeded("the time was up before it was the picture's turn to be decoded") from None
            try:
                decoded = await self._decode_on_thread(data, deadline)
                if decoded is not None:
                    return decoded, await self.infer(decoded.picture.pixels, deadline, requested)
            finally:
                turns.release()
            decoded = await self._decode_in_process(data, deadline)
        else:
            decoded = await self.decode(data, deadline)
        return decoded, await self.infer(decoded.picture.pixels, deadline, requested)

    async def decode(self, data: bytearray, deadline: Deadline) -> Decoded:
        """Decode a file to a picture of the model's size, on a decode thread or in a process of its own.

        Raises `MissingImage` if there are no bytes, and what `Decoders.model_input` raises.
        """
        return await self._decode_on_thread(data, deadline) or await self._decode_in_process(data, deadline)

    async def _decode_on_thread(self, data: bytearray, deadline: Deadline) -> Decoded | None:
        """Return the picture in a file, or None if a process must decode it; raises as `decode`."""
        if not data:
            raise MissingImage("the picture is empty")
        work = partial(self._decode_bounded, data, self.model().preprocess)
        decoded = await self.pools.pictures.run(work, deadline)
        if decoded is not None:
            self.metrics.observe_stage("decode", decoded.seconds)
        return decoded

    async def _decode_in_process(self, data: bytearray, deadline: Deadline) -> Decoded:
        decoded = await self.pools.decoders.model_input(data, self.model().preprocess, deadline)
        self.metrics.observe_stage("decode", decoded.seconds)
        return decoded

    def _decode_bounded(self, data: bytearray, config: PreprocessConfig) -> Decoded | None:
        """Return the picture in a file whose structure bounds the work; None for all others."""
        pixels, scaled = self.settings.max_image_pixels, self.settings.scaled_decode
        started = time.perf_counter()
        try:
            picture = model_input(data, config, max_pixels=pixels, scaled_decode=scaled, bounded=True)
        except UnboundedWork:
            return None
        return Decoded(picture, time.perf_counter() - started)

    async def infer(
        self, pixels: NDArray[np.uint8], deadline: Deadline, requested: RequestedOutputs
    ) -> InferenceResult:
        """Return the model's answer to one picture, uint8 [H, W, C]; raises as `Engine.infer`.

        Labels of the request are compared with the picture's embedding here; their texts are none of the batch's. A map
        of the best of them, which is known only then, is asked for on its own.
        """
        if not requested.labels:
            return await self._infer(pixels, deadline, requested)
        zero_shot = self.model().zero_shot
        assert zero_shot is not None, "routes refuse labels for other models"
        result = await self._infer(pixels, deadline, of_image(requested))
        texts = await self.embed_texts(zero_shot.prompts(requested.labels), deadline)
        features = zero_shot.label_features(texts)
        outputs = zero_shot.compare(result.outputs, features, requested)
        if requested.map is not None and requested.map.of_best_class:
            of_label = RequestedOutputs(1, zero_shot.map_of_best(result.outputs, features))
            explained = await self._infer(pixels, deadline, of_label)
            assert explained.outputs.map is not None, "the engine answers each request for a map"
            outputs = zero_shot.with_map(outputs, explained.outputs.map)
            result = replace(
                result,
                queue_seconds=result.queue_seconds + explained.queue_seconds,
                inference_seconds=result.inference_seconds + explained.inference_seconds,
            )
        return replace(result, outputs=outputs)

    async def embed_texts(self, texts: Sequence[str], deadline: Deadline) -> NDArray[np.float32]:
        """Return the features of texts, [N, D]; raises as `Engine.embed_texts`."""
        remaining = deadline.remaining()
        try:
            with TimeLimit(self.pools.timers, remaining + _LATE_SECONDS):
                return await self.engine.embed_texts(texts, timeout=remaining)
        except TimeoutError:
            raise DeadlineExceeded("the text tower did not answer in time") from None

    async def _infer(
        self, pixels: NDArray[np.uint8], deadline: Deadline, requested: RequestedOutputs
    ) -> InferenceResult:
        """Return the engine's answer to one picture; raises as `Engine.infer`.

        A picture that was launched in time may be answered late, up to `_LATE_SECONDS`: an engine may never answer.
        """
        request = InferenceRequest(pixels, requested)
        remaining = deadline.remaining()
        try:
            with TimeLimit(self.pools.timers, remaining + _LATE_SECONDS):
                result = await self.engine.infer(request, timeout=remaining)
        except TimeoutError:
            raise DeadlineExceeded("the model did not answer in time") from None
        self.metrics.observe_stage("queue", result.queue_seconds)
        self.metrics.observe_stage("inference", result.inference_seconds, result.batch_size)
        return result


class Pipelines:
    """Keeps the pipeline of the current model, as it takes 20 µs to make the pipeline of a generation."""

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
