"""What the requests of a web process share, and the look-up of the model that answers one.

service.acquire(name, deadline)  the model of a name, held until its release
service.load(lease, ...)         load it if it is unloaded
service.check_open()             refuse a request if the service drains or is not ready
service.keep(picture, model)     put a picture into the image store, and get it back by its id
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, cast

from starlette.requests import Request

from model.images.preprocess import ModelInput
from service.engine.base import Engine
from service.errors import Draining, EngineUnavailable, ModelLoading
from service.lifecycle import Lifecycle
from service.models.lease import Lease
from service.models.registry import Models
from service.observe.metrics import Metrics
from service.settings import Settings
from service.web.decoders import Decoders
from service.web.image_stores import ImageStore, id_of_kind, new_image_id
from service.web.lanes import Deadline, Lanes
from service.web.limits import ByteBudget, Limiter
from service.web.middleware import request_context

logger = logging.getLogger("vitserve")

_KNOWN_TEXTS: Final = 4096


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

    def deadline(self, started: float, share: float = 1.0) -> Deadline:
        """Return the end of a part of a request's time.

        Args:
            started: reading of the clock at which the request's headers had been read.
            share: the part of the time.
        """
        return Deadline(started + share * self.settings.request_timeout, self.clock)

    async def acquire(self, name: str | None, deadline: Deadline) -> Lease:
        """Hold a model until its release; an unloaded model is described, and not loaded.

        Raises:
            What `Models.acquire` raises; and for a model that is still to be described, what
            `load` raises.
        """
        if self.models.needs_load(name):
            async with self._loading(name, deadline):
                await self.models.load(name)
        return self.models.acquire(name)

    async def load(self, lease: Lease, deadline: Deadline, caller: str) -> None:
        """Load a held model if it is unloaded; see `Lease.load`.

        Raises:
            ModelLoading: too many requests wait for models, or the time for loading is up.
            QueueFull: every slot is taken.
            What `Lease.load` raises.
        """
        async with self._loading(lease.info.name, deadline):
            await lease.load(caller)

    @asynccontextmanager
    async def _loading(self, name: str | None, deadline: Deadline) -> AsyncIterator[None]:
        """Hold a slot while a request waits for a model; these are at most a quarter of all."""
        with self.limiter.waiting():
            try:
                async with asyncio.timeout(deadline.remaining()):
                    yield
            except TimeoutError:
                raise ModelLoading(f"{name!r:.200} was not loaded in the request's time") from None

    # Kept pictures

    async def keep(
        self, picture: ModelInput, model: Lease, image_id: str | None = None
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

    async def kept(self, image_id: str, model: Lease) -> ModelInput | None:
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
            self.models.require_ready(self.models.default_name)

    def check_ready(self) -> None:
        """Raise an error if load balancers should send requests elsewhere.

        This starts earlier than `check_open`: the service still takes requests.

        Raises:
            Draining: the process was asked to end.
            EngineUnavailable: a batch takes very long in each engine.
        """
        if self.lifecycle.stopping:
            raise Draining("the service is about to stop: try another instance")
        self.models.require_ready(self.models.default_name)
        engines = self.models.default.current.engine.engines
        reasons = [engine.status.reason for engine in engines]
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
            ReceivingFull: the caller leaves too many answers unread.
        """
        self.check_open(needs_engine=needs_engine)
        self.limiter.check(caller=caller)
        self.byte_budget.check_unread(caller)
        free = self.limiter.capacity - self.limiter.in_use
        if free <= self.limiter.capacity // 2:
            self.limiter.check(1 + self.byte_budget.newcomers(free))


def service_of(request: Request) -> Service:
    """Return the service that a request came to."""
    return cast(Service, request.app.state.service)


async def model_of(request: Request, name: str | None = None, *, share: float = 1.0) -> Lease:
    """Return the model that a request names, or the default; held until the answer is ready.

    Args:
        share: part of the request's time that loading may take.

    Raises as `Service.acquire`.
    """
    service = service_of(request)
    context = request_context(request.scope)
    lease = await service.acquire(name, service.deadline(context.started, share))
    context.leases.append(lease)
    return lease
