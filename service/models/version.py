"""One version of a model: its life as a state machine, and the leases by which requests hold it.

               load             engine is warm
    unloaded ----------> loading ----------> ready
       | ^                | | |               | |
       | '----------------' | '---> failed <--' |
       |     no memory      |          |        |
       '-----------+--------+----------+--------'
                   | retire: replaced, unloaded, deleted, or the service stops
                   v
                retiring ----------------> closed
                          close, after the
                          last release

A new version begins as `loading`, and is loaded at once, or moved to `unloaded`. A name has one
current version, and perhaps older ones that retire. Unloading replaces the current version by an
unloaded one of the same number; the old one retires.

A request belongs to one version from its headers to its answer, and so to its labels, input size
and preprocessing:

    lease = models.acquire(name)        describes the model, and holds its version
    await lease.load(models, caller)    loads the version if it is unloaded
    await lease.engine.infer(...)
    lease.release()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar

from model.heads import Head
from service.engine.interface import Engine
from service.engine.messages import ModelInfo
from service.errors import EngineUnavailable, ServiceError

if TYPE_CHECKING:
    from service.engine.backbones import Checkpoint
    from service.models.all_models import Models

E_co = TypeVar("E_co", bound=Engine, covariant=True)

State = Literal["unloaded", "loading", "ready", "failed", "retiring", "closed"]

# Each allowed change of a state, and who makes it. Deleting a model, and the end of the service,
# retire a version in any state (`OpenVersions.retire_all`, `close_all`).
TRANSITIONS: Final[frozenset[tuple[State, State]]] = frozenset(
    (
        ("unloaded", "loading"),  # LocalModel.load_current, for a request or the operator
        ("loading", "unloaded"),  # OnDemandModels, because the memory is full
        ("loading", "ready"),  # its engine, once it is warm
        ("loading", "failed"),  # its engine, if the checkpoint cannot be loaded
        ("ready", "failed"),  # its engine, if the device no longer computes
        ("unloaded", "retiring"),  # LocalModel.take_over
        ("loading", "retiring"),  # OpenVersions.close, after a refused swap
        ("ready", "retiring"),  # LocalModel.take_over, unload
        ("failed", "retiring"),  # LocalModel.load_current, take_over
        ("retiring", "closed"),  # OpenVersions.close, once no request holds it
    )
)


class Version(Generic[E_co]):
    """One version of a model, and the requests that hold it.

    Attributes:
        engine: computes the version.
        number: counts up with each checkpoint that is loaded under the name.
        checkpoint: the loaded checkpoint; None for the configured one.
        requests: number of requests that have not ended.
        grants: number of other processes whose requests may still come.
        on_work: called when the first request begins, and when the last one has ended.
    """

    def __init__(self, engine: E_co, number: int = 1, checkpoint: Checkpoint = None) -> None:
        self.engine = engine
        self.number = number
        self.checkpoint = checkpoint
        self.requests = 0
        self.grants = 0
        self.on_work: Callable[[], None] = lambda: None
        self._released = asyncio.Event()
        self._moved: State | None = None  # None while the engine has the state

    @property
    def state(self) -> State:
        """Return the current state; the engine tells whether it is loading, ready or failed."""
        if self._moved is not None:
            return self._moved
        if self.engine.ready:
            return "ready"
        return "failed" if self.engine.status.state == "failed" else "loading"

    def move(self, state: State) -> None:
        """Change the state; no effect if it is the current one."""
        before = self.state
        if state == before:
            return
        assert (before, state) in TRANSITIONS, f"a version went from {before} to {state}"
        self._moved = None if state == "loading" else state

    def hold(self) -> None:
        """Hold the version for a request, until its `release`."""
        self.requests += 1
        if self.requests == 1:
            self.on_work()

    def release(self) -> None:
        """Release the version from a request."""
        self.requests -= 1
        if not self.requests:
            self._released.set()
            self.on_work()

    def grant(self) -> None:
        """Hold the version for the requests of another process, until its `take_back`."""
        self.grants += 1

    def take_back(self) -> None:
        """Release the version from another process."""
        self.grants -= 1
        self._released.set()

    async def idle(self) -> None:
        """Wait until neither a request nor another process holds the version."""
        while self.requests or self.grants:
            self._released.clear()
            await self._released.wait()


@dataclass(slots=True)
class Lease:
    """A model that a request holds, from its headers to its answer.

    Attributes:
        version: the version that the request belongs to.
        info: the description of the model, or of the served head that the request names.
        head: the head that scores the features, if the request names a served head.
        is_loaded: whether the version could answer when it was acquired, or was loaded since.
    """

    version: Version[Engine]
    info: ModelInfo
    head: Head | None = None
    is_loaded: bool = True

    @property
    def engine(self) -> Engine:
        """Return the engine that computes the version."""
        return self.version.engine

    async def load(self, models: Models, caller: str) -> None:
        """Load the version if it is unloaded; it stays loaded until the release.

        Args:
            models: the models of the service.
            caller: see `Models.load`.

        Raises:
            EngineUnavailable: another version has replaced it meanwhile.
            What `Models.load` raises.
        """
        name = self.info.name
        if not self.engine.ready:  # else it is loaded, even if another model has its name by now
            try:
                await models.load(name, caller)
            except ServiceError:
                if not self.engine.ready:
                    raise
        info = self.engine.info if self.engine.ready else None
        if info is None or (info.content, info.head) != (self.info.content, self.info.head):
            raise EngineUnavailable(f"{name}: it was replaced while it was unloaded: try again")
        self.is_loaded = True

    def release(self) -> None:
        """Stop holding the version."""
        self.version.release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
