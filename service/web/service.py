"""The objects that the requests of a web process share."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from starlette.datastructures import State

from service.draining import Lifecycle
from service.engine.interface import Engine
from service.errors import Draining, EngineUnavailable
from service.models.all_models import Models
from service.observe.metrics import Metrics
from service.settings import Settings
from service.web.api_keys import KeyGuard
from service.web.decoders import Decoders
from service.web.image_stores import ImageStore
from service.web.lanes import Lanes
from service.web.limiter import ByteBudget, Limiter
from service.web.middleware import Answered
from service.web.path_rules import PathRules

_KNOWN_TEXTS: Final = 4096


class KnownTexts:
    """The last texts that each text tower computed; an engine keeps the features of more texts."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Engine, OrderedDict[str, None]] = WeakKeyDictionary()

    def count_new(self, engine: Engine, texts: Sequence[str]) -> int:
        """Return how many of the texts an engine has to compute."""
        known = self._known.get(engine, ())
        return sum(text not in known for text in texts)

    def add(self, engine: Engine, texts: Sequence[str]) -> None:
        """Add texts that an engine has computed, and forget its oldest ones."""
        known = self._known.setdefault(engine, OrderedDict())
        known.update(dict.fromkeys(texts))
        while len(known) > _KNOWN_TEXTS:
            known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Service:
    """The shared objects; `clock` gives monotonic seconds."""

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

    def check_ready(self) -> None:
        """Raise an error if load balancers should send requests elsewhere.

        A stop begins with this refusal, while `check_open` still lets requests pass.

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


class ApplicationState(State):
    """The shared objects of an application, as `app.state`; extensions may add their own.

    Attributes:
        service: the objects that requests share.
        guard: checks API keys.
        on_models_changed: functions that are called after each change of a model.
        rules: how middleware treats paths; set once extensions have added their routes.
        count: counts and logs a request that did not arrive over HTTP; set with the middleware.
    """

    service: Service
    guard: KeyGuard
    on_models_changed: list[Callable[[], None]]
    rules: PathRules
    count: Callable[[Answered, str | None], None]
