"""One request's way through the service: admitted, its body read, its picture decoded, the model's
answer inferred.

    async with service_of(request).admit(request, await model_of(request)) as admitted:
        picture = await admitted.read_picture()
        decoded, result = await admitted.classify(picture, requested)

Everything that a request holds is given back where `admit` ends: its places, the bytes of its body,
its turns, and the model, which stays the same on the whole way.
"""

import asyncio
import copy
import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Sequence,
)
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import IPv6Address, IPv6Network
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive

from model.config import PreprocessConfig
from model.errors import ImageError
from model.heads import Head, compared, of_image
from model.images.decode import is_bounded
from model.images.preprocess import ModelInput, Region, model_input
from model.outputs import Outputs, RequestedOutputs
from service.engine.base import Engine
from service.engine.devices import decode_threads
from service.engine.messages import InferenceRequest, InferenceResult, ModelInfo
from service.engine.streams import MAX_EXPLANATION_BATCH
from service.errors import (
    ClientDisconnected,
    DeadlineExceeded,
    Draining,
    EngineUnavailable,
    InferenceFailed,
    MissingImage,
    ModelLoading,
    RequestTimeout,
    ServiceError,
    UploadTooLarge,
)
from service.extensions.teach.heads import TaughtHeads
from service.http import connection_of
from service.lifecycle import Lifecycle
from service.models.generation import Generation, ServedModel
from service.models.registry import UNNAMED, Models, load_caller
from service.observe.metrics import Metrics
from service.settings import Settings
from service.web.admission import Body, Limiter, Permit, Receiving
from service.web.decoders import Decoded, Decoders
from service.web.image_stores import ImageStore, id_of_kind, new_image_id
from service.web.lanes import Deadline, Job, Lane
from service.web.middleware import request_context
from service.web.upload import (
    BYTES_A_VALUE,
    WHOLE_BODY,
    Bound,
    Upload,
    UploadedFile,
    UploadLimits,
    is_text,
    picture_of_text,
    read_files,
    read_whole,
)
from vitserve.documents import FIELD

logger = logging.getLogger("vitserve")

T = TypeVar("T")
R = TypeVar("R")

# A picture that was launched in time may be answered late. Nobody waits longer than a second more
# than the request's time; what is left is for the answer's way.
LATE_SECONDS: Final = 0.5

# Values from which on a document is read or written by a thread: it would hold the event loop for 5
# to 10 ms.
LARGE: Final = 2000

# Batches of each engine whose pictures are decoded, or being decoded, at once: two under way, and
# two that wait. Decoding that runs further ahead would take the processors from the batches that
# are to be answered first.
_BATCHES_AHEAD: Final = 4

# Requests whose texts the tower computes in turn, and how many of one caller: more would all be
# late, not some.
_TEXTS_AT_ONCE: Final = 8
_TEXTS_OF_EACH: Final = 2
_KNOWN_TEXTS: Final = 4096

# Threads that read and write the examples of taught heads: while a writer waits for another
# process, one reads on.
_EXAMPLE_THREADS: Final = 2

# Multiplications from which on a thread scores heads; it takes 0.1 ms of the event loop to hand
# them over.
_LARGE_SCORES: Final = 1 << 18


class Lanes:
    """The queues of a web process before everything that is scarce."""

    def __init__(
        self, settings: Settings, models: Models, decoders: Decoders, clock: Callable[[], float]
    ) -> None:
        def ahead(most: float = math.inf) -> int:
            engine = models.default.current.engine
            info = engine.info
            return (
                _BATCHES_AHEAD
                * len(engine.engines)
                * int(min(most, 1 if info is None else info.max_batch))
            )

        self.pictures = Lane("decode", ahead, threads=decode_threads(settings), clock=clock)
        self.decoders = Lane("decoders", lambda: decoders.processes, clock=clock)
        self.documents = Lane("documents", threads=1, clock=clock)
        self.drawings = Lane("drawing", threads=1, clock=clock)
        self.heads = Lane("heads", threads=1, clock=clock)
        self.examples = Lane("examples", threads=_EXAMPLE_THREADS, clock=clock)
        self.texts = Lane("texts", lambda: _TEXTS_AT_ONCE, clock=clock, each=_TEXTS_OF_EACH)
        self.explanations = Lane("explanations", lambda: ahead(MAX_EXPLANATION_BATCH), clock=clock)

    def close(self) -> None:
        """Begin nothing more, without waiting for the threads."""
        for lane in (self.pictures, self.documents, self.drawings, self.heads, self.examples):
            lane.close()


class KnownTexts:
    """Texts that text towers have computed lately; an engine stores the features of more."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, str], None] = OrderedDict()

    def new(self, engine: Engine, texts: Sequence[str]) -> int:
        """Return how many texts an engine has to compute."""
        return sum((id(engine), text) not in self._known for text in texts)

    def add(self, engine: Engine, texts: Sequence[str]) -> None:
        """Add texts that an engine has computed; those that came first are forgotten."""
        self._known.update(((id(engine), text), None) for text in texts)
        while len(self._known) > _KNOWN_TEXTS:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Model:
    """The model of a request: the generation that it belongs to, its description, and its head if
    that is a taught one.

    Such a head scores the features that the generation gives.

    Attributes:
        unloaded: whether it is loaded only when the request's picture is decoded: what is refused
        wakes nobody.
    """

    generation: Generation[Engine]
    info: ModelInfo
    taught: Head | None = None
    unloaded: bool = False


class Sender(NamedTuple):
    """Who sends a request.

    Attributes:
        caller: the name of its key, or else its address; see `network_of`.
        started: reading of the clock at which the head of the request had been read.
        receive: returns the next part of the body.
        left: done when the caller is gone, or a coroutine that waits for that; None: the request is
        cancelled then.
        headers, request_id, prefix: of the request; links of its answer begin with the prefix.
    """

    caller: str
    started: float
    receive: Receive
    left: asyncio.Future[None] | Callable[[Receive], Coroutine[Any, Any, None]] | None = None
    headers: Headers = Headers()
    request_id: str = ""
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Service:
    """Everything that the requests of a web process share; `clock` gives monotonic seconds."""

    models: Models
    settings: Settings
    metrics: Metrics
    limiter: Limiter
    receiving: Receiving
    images: ImageStore
    lifecycle: Lifecycle
    lanes: Lanes
    decoders: Decoders
    taught: TaughtHeads
    texts: KnownTexts = field(default_factory=KnownTexts)
    clock: Callable[[], float] = time.monotonic

    def model(self, name: str | None = None) -> Model:
        """Return the model of a name, None for the default, as it is current now.

        It may be gone as soon as another took over, unless a request is admitted with it.

        Raises:
            UnknownModel: there is no such model.
            ModelFailed: it could not be loaded.
            EngineUnavailable: it is not ready.
        """
        return self._current(name, self.models.find(name))

    def _current(self, name: str | None, served: ServedModel) -> Model:
        engine = served.current.engine
        info = engine.info
        if info is None or not engine.ready:
            self.models.require_loadable(name)
            reason = self.models.status_of(self.models.key(name)).reason
            raise EngineUnavailable(reason or engine.status.reason)
        return self._described(name, served.current, info)

    def _described(
        self,
        name: str | None,
        generation: Generation[Engine],
        info: ModelInfo,
        *,
        unloaded: bool = False,
    ) -> Model:
        added = self.models.added.get(name or "")
        if added is None:
            return Model(generation, info, unloaded=unloaded)
        return Model(generation, added.info(info), added.head, unloaded)

    async def find(self, name: str | None, started: float, *, share: float = 1.0) -> Model:
        """Return the model of a name, of an unloaded one its description: see `Model`; raises as
        `loaded_model`.
        """
        served = self.models.find(name)
        if served.current.engine.ready:
            return self._current(name, served)
        if served.state == "unloaded" and served.info is not None:
            return self._described(name, served.current, served.info, unloaded=True)
        return await self.loaded_model(name, started, share=share)

    async def loaded_model(self, name: str | None, started: float, *, share: float = 1.0) -> Model:
        """Return the model of a name for a request whose head came at a reading of the clock; see
        `model`.

        One that is not loaded is waited for, but for the default one, without which the service is
        not ready. Who waits takes a place, and all who do a quarter of them at most. It may take a
        share of the request's time.

        Raises:
            ModelLoading: so many wait already, or it is not loaded in the request's time.
            ModelsFull: there is no memory for it.
            QueueFull: there is no place.
        """
        served = self.models.find(name)
        if not served.current.engine.ready and served is not self.models.default:
            self.models.require_loadable(name)
            deadline = Deadline(started + share * self.settings.request_timeout, self.clock)
            with self.limiter.waiting():
                try:
                    async with asyncio.timeout(deadline.remaining()):
                        await self.models.available(name)
                except TimeoutError:
                    raise ModelLoading(
                        f"{name!r:.200} was not loaded in the request's time"
                    ) from None
        return self.model(name)

    async def keep(
        self, picture: ModelInput, model: Model, image_id: str | None = None
    ) -> str | None:
        """Store a picture as a model sees it, and return its id, or None; an id may have one of
        each preprocessing.
        """
        image_id = image_id or new_image_id()
        try:
            stored = await self.images.put(picture, id_of_kind(image_id, model.info.preprocess))
        except (
            Exception
        ):  # a store is an extension: whatever fails in it costs the answer its id alone
            logger.exception("the picture is not kept")
            return None
        return stored and image_id

    async def kept(self, image_id: str, model: Model) -> ModelInput | None:
        """Return the picture of an id as a model sees it, or None where it is not stored."""
        picture = await self.images.get(id_of_kind(image_id, model.info.preprocess))
        # What another replica stored may be anything.
        return (
            picture
            if picture is not None and picture.pixels.shape == model.info.input_shape
            else None
        )

    def check_open(self, *, needs_engine: bool = True) -> None:
        """Raise `Draining` or `EngineUnavailable` if the service takes no requests."""
        if self.lifecycle.draining:
            raise Draining("the service is about to stop: try another instance")
        if needs_engine and not self.models.default.current.engine.ready:
            self.model()

    def check_ready(self) -> None:
        """Raise what `check_open` does, and where load balancers are to look away though requests
        are still taken.

        Raises:
            Draining: the process was asked to end.
            EngineUnavailable: each engine computes a batch that takes very long.
        """
        if self.lifecycle.stopping:
            raise Draining("the service is about to stop: try another instance")
        reasons = [engine.status.reason for engine in self.model().generation.engine.engines]
        if all(reasons):
            raise EngineUnavailable(reasons[0])

    def check_room(self, caller: str = "", *, needs_engine: bool = True) -> None:
        """Raise `QueueFull`, or what `check_open` raises, if a request would get no place; it takes
        none.

        Bodies that have just begun to arrive will take places. Without counting them, many callers
        would be admitted for each free place, and most of them refused when their bodies are here.
        Such bodies keep at most half of the places, as a caller can begin a body and never end it.
        """
        self.check_open(needs_engine=needs_engine)
        self.limiter.check(caller=caller)
        free = self.limiter.capacity - self.limiter.in_use
        if free <= self.limiter.capacity // 2:
            self.limiter.check(1 + self.receiving.newcomers(free))

    def admit(
        self, request: Request, model: Model | None = None, *, needs_place: bool = True
    ) -> "AdmittedRequest":
        """Admit a request over HTTP; see `AdmittedRequest`."""
        context, connection = request_context(request.scope), connection_of(request.scope)
        if model is not None:
            context.model = model.info.name
        caller = context.key_name or (network_of(request.client.host) if request.client else "")
        left = _disconnected if connection is None else connection.left
        sender = Sender(
            caller,
            context.started,
            request.receive,
            left,
            request.headers,
            context.request_id,
            context.prefix or "",
        )
        return AdmittedRequest(self, model, sender, needs_place=needs_place)


def network_of(address: str) -> str:
    """Return an IPv4 address as it is, and the network of an IPv6 address: who has one has all 2^64
    of its network.
    """
    if address.count(":") > 1:
        with suppress(ValueError):  # a proxy may send anything
            given = IPv6Address(address)
            return str(given.ipv4_mapped or IPv6Network((int(given) >> 64 << 64, 64)))
    return address


def service_of(request: Request) -> Service:
    """Return the service that a request came to."""
    return cast(Service, request.app.state.service)


async def model_of(request: Request, name: str | None = None) -> Model:
    """Return the model of a request, by default the default one; raises as `Service.find`."""
    return await service_of(request).find(name, request_context(request.scope).started)


class AdmittedRequest:
    """A request on its way, with all that it holds; as a context manager, it is admitted until the
    context ends.

    Its places are taken when its body is here. A generator would cost the event loop more.

    Args:
        model: that answers it; None: it asks none, or `choose` names the model later.
        needs_place: refuse it now if there is none.

    Attributes:
        model: that answers it.
        sender: who sends it.
        deadline: when its time is up.
        limit: ends it when its time is up.
        caller_left: whether the caller was seen to leave.

    Raises:
        QueueFull, Draining, EngineUnavailable: there is no room.
        RequestTimeout, DeadlineExceeded: its time was up before its body was here, or before it was
        answered.
        ClientDisconnected: the caller left.
    """

    task: asyncio.Task[Any]
    model: Model

    def __init__(
        self, service: Service, model: Model | None, sender: Sender, *, needs_place: bool = True
    ) -> None:
        self.service = service
        self._first_model = model
        self.sender = sender
        self.deadline = Deadline(sender.started + service.settings.request_timeout, service.clock)
        self.limit = asyncio.timeout(None)
        self.caller_left = False
        self._needs_place = needs_place
        self._caller = sender.caller
        self._body = Body()
        self._permit = Permit(service.limiter, sender.caller)
        self._generations: list[Generation[Engine]] = []  # of all models that answer
        self._reading = False
        self._loading, self._embedding = asyncio.Lock(), asyncio.Lock()
        self._watcher: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        if self._needs_place:
            await self.service.limiter.settle(caller=self.sender.caller)
            self.service.check_room(self.sender.caller, needs_engine=self._first_model is not None)
        task = asyncio.current_task()
        assert task is not None, "a request is a task"
        self.task = task
        if self._first_model is not None:
            self.choose(self._first_model)
        await self.limit.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.limit.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise self._time_is_up() from None
        finally:
            self._close()
        if isinstance(error, TimeoutError) and self.limit.expired():
            raise self._time_is_up() from None
        if (
            isinstance(error, asyncio.CancelledError)
            and self.caller_left
            and self.task.cancelling() <= 1
        ):
            self.task.uncancel()
            raise ClientDisconnected("the caller went away") from None

    def choose(self, model: Model) -> None:
        """Let the request belong to a model until it ends, and be answered by it from now on."""
        self.model = model
        self._generations.append(model.generation)
        model.generation.begin()

    def by(self, model: Model) -> Self:
        """Return the same request as another model is to answer it, which it belongs to until it
        ends.
        """
        other = copy.copy(self)
        other.choose(model)
        return other

    async def load(self, *, share: float = 1.0) -> None:
        """Have the request's model loaded if it is unloaded; pictures of a batch wait as one.

        Raises:
            EngineUnavailable: another process replaced it meanwhile.
            What `Service.loaded_model` raises, for the same `share`.
        """
        if not self.model.unloaded:
            return
        with self._permit.lent():
            async with self._loading:
                if self.model.unloaded:
                    await self._load(self.model, share)

    async def _load(self, before: Model, share: float) -> None:
        own = before.generation
        if not own.engine.ready:  # else it is loaded, though another one may have its name by now
            token = load_caller.set(self.sender.caller or UNNAMED)
            try:
                found = await self.service.loaded_model(
                    before.info.name, self.sender.started, share=share
                )
                own = own if own.engine.ready else found.generation
            except ServiceError:
                if not own.engine.ready:
                    raise
            finally:
                load_caller.reset(token)
        info = own.engine.info
        if info is None or (info.content, info.head) != (before.info.content, before.info.head):
            raise EngineUnavailable(
                f"{before.info.name}: it was replaced while it was unloaded: try again"
            )
        self.choose(replace(before, generation=own, unloaded=False))

    def count_image(self, model: str, outputs: Outputs | None = None) -> None:
        """Count a picture that a model answered just now; see `Metrics.count_image`."""
        self.service.metrics.count_image(model, outputs, self.service.clock() - self.sender.started)

    # The body is read

    async def read_upload(
        self,
        parameters: Collection[str] = (),
        *,
        several: bool = False,
        fields: Collection[str] = (FIELD,),
    ) -> Upload:
        """Return the pictures in the body, and the form's other fields; no slot is taken yet.

        Args:
            parameters: names of the form fields that are parameters of the route.
            several: whether there may be more than one picture.
            fields: names of the form fields with pictures.

        Raises `QueueFull`, and what `read` and `service.web.upload.read_files` raise.
        """
        settings, limiter = self.service.settings, self.service.limiter
        limits = UploadLimits(
            settings.max_upload_bytes,
            settings.max_request_bytes,
            settings.max_images_per_request if several else 1,
            fields,
            parameters,
            "VIT_MAX_IMAGES_PER_REQUEST" if several else "",
        )
        numbers = itertools.count(2)
        return await self.read(
            lambda receive: read_files(
                self.sender.headers,
                receive,
                limits,
                lambda: limiter.check(next(numbers), self.sender.caller),
                self.write,
            )
        )

    async def read_body(self, limit: int | None = None) -> bytearray:
        """Return the whole body, which is no picture; it takes no place.

        `limit` is how many bytes it may have, if not those of the settings. Raises as `read`.
        """
        bound = (
            Bound(limit) if limit else Bound(self.service.settings.max_request_bytes, WHOLE_BODY)
        )
        return await self.read(lambda receive: read_whole(self.sender.headers, receive, bound))

    async def read(self, reader: Callable[[Receive], Awaitable[T]]) -> T:
        """Return what `reader` makes of the body, whose bytes and time are bounded.

        Raises:
            ReceivingFull: there is no memory for the body. What the reader raises; and the context
            of the request `RequestTimeout`, where the body did not arrive in time, or crawled while
            others needed its room.
        """
        started, self._reading = self.service.clock(), True
        self._end_in(self.deadline.remaining())
        with self.service.receiving.arriving(self._body, partial(self._end_in, 0.0)):
            content = await reader(self._receive)
        self._reading = False
        self.service.metrics.observe_stage("read", self.service.clock() - started)
        return content

    async def _receive(self) -> Message:
        message = await self.sender.receive()
        self.service.receiving.add(self._body, len(message.get("body", b"")))
        return message

    async def take(self, places: int) -> None:
        """Take so many places, all or none, now that the body is here; raises `QueueFull`.

        From now on the request ends when its caller leaves.
        """
        await self.service.limiter.settle(places, self.sender.caller)
        self._permit.extend(places)
        self._end_in(self.deadline.remaining() + LATE_SECONDS)
        left = self.sender.left
        if left is not None:
            self._watcher = (
                asyncio.ensure_future(left(self.sender.receive)) if callable(left) else left
            )
            self._watcher.add_done_callback(self._leave)

    # It is decoded

    async def decoded(self, data: bytearray) -> tuple[Decoded, Job[Any]]:
        """Return what a file holds as a picture of the model's size, and its turn, a context to be
        left.

        A thread decodes a file whose header bounds the work, a process of its own any other. What a
        process decoded has a turn beside what threads decode, which costs what a file of as many
        bytes does; the process waits for it, so that decoding there runs no further ahead either.

        Raises `MissingImage` if there are no bytes, `QueueFull`, and what `Decoders.model_input`
        raises.
        """
        service, config = self.service, self.model.info.preprocess
        if not data:
            raise MissingImage("the picture is empty")
        if is_text(data):
            work_on_text = partial(picture_of_text, data, service.settings.max_upload_bytes)
            data = await self.write(work_on_text, size=len(data) // BYTES_A_VALUE)
        if is_bounded(data):
            work = partial(_decode, data, config, service.settings)
            job: Job[Any] = service.lanes.pictures.work(
                work, self._caller, len(data), self.deadline
            )
            with self._permit.lent(keep=1):  # a batch does not keep others out
                decoded = await _held(job)
        else:
            async with self._beside(service.lanes.decoders):
                decoded = await service.decoders.model_input(data, config, self.deadline)
                job = service.lanes.pictures.turn(
                    self._caller, decoded.picture.pixels.nbytes, self.deadline
                )
                await _held(job)
        service.metrics.observe_stage("decode", decoded.seconds)
        return decoded, job

    async def photo(self, data: bytearray, region: Region, size: int | None) -> ModelInput:
        """Return the photo in a file, at most so large, with the region of it that the model saw."""
        async with self._beside(self.service.lanes.decoders):
            return (await self.service.decoders.photo(data, region, size, self.deadline)).picture

    @asynccontextmanager
    async def _beside(self, lane: Lane, size: float = 1) -> AsyncIterator[None]:
        """Have a turn in a lane, with one of the request's places lent to others meanwhile."""
        with self._permit.lent(), lane.turn(self._caller, size, self.deadline) as turn:
            await turn
            yield

    # The model answers

    async def classify(
        self, data: bytearray, requested: RequestedOutputs
    ) -> tuple[Decoded, InferenceResult]:
        """Return the picture in a file as the model saw it, and the answer; raises as `decoded` and
        `infer`.

        A picture keeps its turn until it is answered, so that decoding does not run far ahead of
        the model. Where a map is asked, texts have to be computed, or the model is to be loaded, it
        gives the turn back first: that may take long. Its place is free as soon as it is answered
        or refused, though others of its batch are not.

        New texts come first, as they are scarcer than passes: who is refused there costs no pass.
        Those of an unloaded model come last, as a picture that is refused does not load it.
        """
        asked = (
            of_image(requested, self.model.taught)
            if requested.labels or self.model.taught
            else requested
        )
        try:
            head = None if self.model.unloaded else await self._head(requested)
            decoded, turn = await self.decoded(data)
            with turn:
                pixels = decoded.picture.pixels
                is_slow = requested.map is not None or self.model.unloaded
                first = None if is_slow else await self._batched(pixels, asked)
            return decoded, await self.infer(pixels, requested, first, head)
        finally:
            self._permit.release()

    async def infer(
        self,
        pixels: NDArray[np.uint8],
        requested: RequestedOutputs,
        first: InferenceResult | None = None,
        head: Head | None = None,
    ) -> InferenceResult:
        """Return the model's answer to one picture, uint8 [H, W, C]; raises as `load` and
        `Engine.infer`.

        A taught head scores the picture's embedding here, and so do labels of the request, whose
        texts are none of the batch's. `first` is the batch's answer and `head` that of the labels,
        if they are there already.
        """
        await self.load()
        head = head or await self._head(requested)
        if head is None:
            return first or await self._infer(pixels, requested)
        result = first or await self._infer(pixels, of_image(requested, head))
        outputs = await self.score(partial(scored, result.outputs, head, requested), cost=head.cost)
        return replace(result, outputs=outputs)

    async def _head(self, requested: RequestedOutputs) -> Head | None:
        """Return the head that scores an embedding: a taught one, or that of the request's labels."""
        if self.model.taught is not None or not requested.labels:
            return self.model.taught
        zero_shot = self.model.info.zero_shot
        assert zero_shot is not None, "routes refuse labels for other models"
        texts = await self.embed_texts(zero_shot.prompts(requested.labels))
        return await self.score(partial(zero_shot.head, requested.labels, texts), cost=texts.size)

    async def _infer(
        self, pixels: NDArray[np.uint8], requested: RequestedOutputs
    ) -> InferenceResult:
        """Infer in a turn beside other maps with a pass of their own, or beside other pictures."""
        if requested.needs_pass:
            async with self._beside(self.service.lanes.explanations):
                return await self._batched(pixels, requested)
        with self.service.lanes.pictures.turn(self._caller, pixels.nbytes, self.deadline) as turn:
            await turn
            return await self._batched(pixels, requested)

    async def _batched(
        self, pixels: NDArray[np.uint8], requested: RequestedOutputs
    ) -> InferenceResult:
        engine, head = self.model.generation.engine, self.model.info.head
        if head and not requested.head:
            requested = replace(requested, head=head)
        result = await engine.infer(
            InferenceRequest(pixels, requested, self._caller), timeout=self.deadline.remaining()
        )
        self.service.metrics.observe_stage("queue", result.queue_seconds)
        self.service.metrics.observe_stage("inference", result.inference_seconds, result.batch_size)
        return result

    async def embed_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the features of texts, in a turn if some are new; raises as `load` and
        `Engine.embed_texts`.
        """
        await self.load()
        engine, known, lane = (
            self.model.generation.engine,
            self.service.texts,
            self.service.lanes.texts,
        )
        with self._permit.lent():
            async with self._embedding:  # pictures of a batch ask for the same
                new = known.new(engine, texts)
                with lane.turn(self._caller, new, self.deadline) if new else nullcontext() as turn:
                    if turn is not None:
                        await turn
                    features = await engine.embed_texts(texts, timeout=self.deadline.remaining())
                if new:
                    known.add(engine, texts)
        return features

    async def score(self, work: Callable[[], T], *, cost: int) -> T:
        """Return the scores of heads that `work` returns: here, or from a thread if they are many
        multiplications.
        """
        if cost < _LARGE_SCORES:
            return work()
        with (
            self._permit.lent(),
            self.service.lanes.heads.work(work, self._caller, cost, self.deadline) as job,
        ):
            return await job

    async def with_examples(self, work: Callable[[], T]) -> T:
        """Return what `work` reads from, or writes to, the examples of taught heads, on a thread."""
        with (
            self._permit.lent(),
            self.service.lanes.examples.work(work, self._caller, 1, self.deadline) as job,
        ):
            return await job

    # The answer is written

    async def write(self, work: Callable[[], T], size: int) -> T:
        """Return what `work` returns: here, or from a thread if it handles many values."""
        if size < LARGE:
            return work()
        with self.service.lanes.documents.work(work, self._caller, size, self.deadline) as job:
            return await job

    async def draw(self, work: Callable[[], T], *, size: int) -> T:
        """Return what a thread draws, of so many pixels."""
        with (
            self._permit.lent(),
            self.service.lanes.drawings.work(work, self._caller, size, self.deadline) as job,
        ):
            return await job

    # It ends

    def _end_in(self, seconds: float) -> None:
        self.limit.reschedule(asyncio.get_running_loop().time() + seconds)

    def _leave(self, _: object) -> None:
        self.caller_left = True
        self.task.cancel()

    def _time_is_up(self) -> Exception:
        """Return the error of a request whose time is up."""
        if self._body.gave_way:
            return RequestTimeout("the body came too slowly while others waited for its room")
        if self._reading:
            return RequestTimeout(
                f"the body did not arrive within {self.service.settings.request_timeout:g} s"
            )
        return DeadlineExceeded("the request was not answered in time")

    def _close(self) -> None:
        """Watch the caller no more, and give back what the request holds."""
        if self._watcher is not None:
            self._watcher.remove_done_callback(self._leave)
            if self._watcher is not self.sender.left:
                self._watcher.cancel()
        for generation in self._generations:
            generation.end()
        self._permit.close()
        self.service.receiving.give_back(self._body)


def scored(outputs: Outputs, head: Head, requested: RequestedOutputs) -> Outputs:
    """Return what a head answers, see `compared`; raises `InferenceFailed` if its scores are not
    finite.
    """
    answer = compared(outputs, head, requested)
    if not answer.finite:
        raise InferenceFailed("the head gave no finite score for this image")
    return answer


async def _held(job: Job[T]) -> T:
    """Return what a job returns, which goes on to hold its turn; where it fails, it is left."""
    try:
        return await job
    except BaseException:
        job.leave()
        raise


def _decode(data: bytearray, config: PreprocessConfig, settings: Settings) -> Decoded:
    started = time.perf_counter()
    picture = model_input(
        data, config, max_pixels=settings.max_image_pixels, scaled_decode=settings.scaled_decode
    )
    return Decoded(picture, time.perf_counter() - started)


def require_file(uploaded: UploadedFile) -> bytearray:
    """Return the bytes of a file, or raise the error that they are too many."""
    if isinstance(uploaded, UploadTooLarge):
        raise uploaded
    return uploaded


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side and return their results, in order.

    When a coroutine fails, the others are cancelled. Its error is raised after they have ended,
    because until then they hold memory of the request.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except ExceptionGroup as failed:
        failed.__traceback__ = None  # a frame of it holds the group itself, and the tasks with all that they were given
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def of_each(handle: Callable[[T], Coroutine[Any, Any, R]], pictures: Sequence[T]) -> list[R]:
    """Do as `all_of` with each picture of a request; an error names the picture's position if there
    are several.
    """

    async def one(position: int, picture: T) -> R:
        try:
            return await handle(picture)
        except (ImageError, ServiceError) as error:
            if len(pictures) == 1:
                raise
            named = copy.copy(error)  # the same error may be raised for each picture of a batch
            named.args = (f"picture {position}: {error}",)
            raise named from None

    return await all_of(one(*each) for each in enumerate(pictures))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
