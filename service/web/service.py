"""What the requests of a web process share, and the look-up of the model that answers one.

service.find(name, started)      the model of a name; an unloaded one by its description
service.loaded_model(...)        the same, loaded if necessary
service.check_open()             is the service open, ready, and does it have a free slot?
service.keep(picture, model)     put a picture into the image store, and get it back by its id
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from starlette.requests import Request

from model.heads import Head
from model.images.preprocess import ModelInput
from service.engine.base import Engine
from service.engine.messages import ModelInfo
from service.errors import Draining, EngineUnavailable, ModelLoading
from service.lifecycle import Lifecycle
from service.models.generation import Generation, ServedModel
from service.models.registry import Models
from service.observe.metrics import Metrics
from service.settings import Settings
from service.web.admission import ByteBudget, Limiter
from service.web.decoders import Decoders
from service.web.image_stores import ImageStore, id_of_kind, new_image_id
from service.web.lanes import Deadline, Lanes
from service.web.middleware import request_context

logger = logging.getLogger("vitserve")

_KNOWN_TEXTS: Final = 4096


@dataclass(frozen=True, slots=True)
class Model:
    """The model of a request.

    Attributes:
        generation: the version that the request belongs to; its engine gives the features.
        info: the description of the model.
        taught: the head that scores the features, if the model is a taught head.
        unloaded: whether the model is loaded only when the request's picture is decoded, so that
            a refused request does not load a model.
    """

    generation: Generation[Engine]
    info: ModelInfo
    taught: Head | None = None
    unloaded: bool = False


class KnownTexts:
    """The last texts that each text tower computed; an engine stores the features of more."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, str], None] = OrderedDict()

    def count_new(self, engine: Engine, texts: Sequence[str]) -> int:
        """Return how many of the texts an engine has to compute."""
        return sum((id(engine), text) not in self._known for text in texts)

    def add(self, engine: Engine, texts: Sequence[str]) -> None:
        """Add texts that an engine has computed, and forget the oldest ones."""
        self._known.update(((id(engine), text), None) for text in texts)
        while len(self._known) > _KNOWN_TEXTS:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Service:
    """Everything that the requests of a web process share; `clock` gives monotonic seconds."""

    models: Models
    settings: Settings
    metrics: Metrics
    limiter: Limiter
    byte_budget: ByteBudget
    images: ImageStore
    lifecycle: Lifecycle
    lanes: Lanes
    decoders: Decoders
    texts: KnownTexts = field(default_factory=KnownTexts)
    clock: Callable[[], float] = time.monotonic

    # Models

    def model(self, name: str | None = None) -> Model:
        """Return the current model of a name, of the default model if the name is None.

        Another generation may replace it at any time, unless a request is admitted with it.

        Raises:
            UnknownModel: the name is unknown.
            ModelFailed: the model could not be loaded.
            EngineUnavailable: the model is not ready.
        """
        return self._current(name, self.models.find(name))

    async def find(self, name: str | None, started: float, *, share: float = 1.0) -> Model:
        """Return the model of a name, without loading an unloaded one; raises as `loaded_model`."""
        served = self.models.find(name)
        if served.current.engine.ready:
            return self._current(name, served)
        if served.state == "unloaded" and served.info is not None:
            return self._described(name, served.current, served.info, unloaded=True)
        return await self.loaded_model(name, started, share=share)

    async def loaded_model(self, name: str | None, started: float, *, share: float = 1.0) -> Model:
        """Return the model of a name once it is loaded; raises as `model`.

        Waiting requests hold a slot each, together at most a quarter of the slots. Requests do not
        wait for the default model, because the service is not ready without it.

        Args:
            started: reading of the clock at which the request's headers had been read.
            share: part of the request's time that loading may take.

        Raises:
            ModelLoading: too many requests wait for models, or the time for loading is up.
            ModelsFull: the memory for models is full.
            QueueFull: every slot is taken.
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

    # Kept pictures

    async def keep(
        self, picture: ModelInput, model: Model, image_id: str | None = None
    ) -> str | None:
        """Store a picture as a model sees it, and return its id, or None if it is not stored.

        Models with different preprocessing store a picture each under the same id.
        """
        image_id = image_id or new_image_id()
        try:
            stored = await self.images.put(picture, id_of_kind(image_id, model.info.preprocess))
        except Exception:  # any error of a store costs the answer only its id
            logger.exception("the picture is not kept")
            return None
        return stored and image_id

    async def kept(self, image_id: str, model: Model) -> ModelInput | None:
        """Return the stored picture of an id as a model sees it, or None if it is not stored."""
        picture = await self.images.get(id_of_kind(image_id, model.info.preprocess))
        # Another replica may have stored anything under this id.
        if picture is None or picture.pixels.shape != model.info.input_shape:
            return None
        return picture

    # Readiness

    def check_open(self, *, needs_engine: bool = True) -> None:
        """Raise `Draining` or `EngineUnavailable` if the service does not take requests."""
        if self.lifecycle.draining:
            raise Draining("the service is about to stop: try another instance")
        if needs_engine and not self.models.default.current.engine.ready:
            self.model()

    def check_ready(self) -> None:
        """Raise an error if load balancers should send requests elsewhere.

        This starts earlier than `check_open`: the service still takes requests.

        Raises:
            Draining: the process was asked to end.
            EngineUnavailable: a batch takes very long in each engine.
        """
        if self.lifecycle.stopping:
            raise Draining("the service is about to stop: try another instance")
        reasons = [engine.status.reason for engine in self.model().generation.engine.engines]
        if all(reasons):
            raise EngineUnavailable(reasons[0])

    def check_room(self, caller: str = "", *, needs_engine: bool = True) -> None:
        """Raise `QueueFull` if a request would not get a slot, without taking one.

        Bodies that have just begun to arrive will take slots. Without counting them, many callers
        would be admitted for each free slot, and most of them refused once their bodies are here.
        Such bodies reserve at most half of the slots, because a caller can begin a body and never
        end it.

        Raises:
            Draining, EngineUnavailable: as `check_open`.
        """
        self.check_open(needs_engine=needs_engine)
        self.limiter.check(caller=caller)
        free = self.limiter.capacity - self.limiter.in_use
        if free <= self.limiter.capacity // 2:
            self.limiter.check(1 + self.byte_budget.newcomers(free))


def service_of(request: Request) -> Service:
    """Return the service that a request came to."""
    return cast(Service, request.app.state.service)


async def model_of(request: Request, name: str | None = None) -> Model:
    """Return the model that a request names, or the default model; raises as `Service.find`."""
    return await service_of(request).find(name, request_context(request.scope).started)
