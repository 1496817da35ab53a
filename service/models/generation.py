"""The versions of a model that is served, and the leases by which requests hold them.

A request belongs to one version from its headers to its answer, and so to its labels, input size
and preprocessing:

    lease = models.acquire(name)        describes the model, and holds its version
    await lease.load(caller)            loads the version if it is unloaded
    await lease.engine.infer(...)
    lease.release()

`service.models.states` draws the states of a version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from model.heads import Head
from service.background import Tasks
from service.engine.backbones import Checkpoint
from service.engine.base import Engine
from service.engine.messages import ModelInfo
from service.errors import EngineUnavailable, ServiceError
from service.models.states import ModelState, State, require_transition

if TYPE_CHECKING:
    from service.models.registry import Models

E_co = TypeVar("E_co", bound=Engine, covariant=True)


class Version(NamedTuple):
    """A version of a model.

    Attributes:
        number: counts up with each version that is loaded.
        checkpoint: the loaded checkpoint, see `Models.put`; None for the configured one.
        gone: whether the model was deleted.
    """

    number: int = 1
    checkpoint: Checkpoint = None
    gone: bool = False


class Generation(Generic[E_co]):
    """One version of a model, and the requests that it answers.

    Attributes:
        engine: computes the version.
        number: counts up with each version that is loaded.
        checkpoint: the loaded checkpoint; None for the configured one.
        requests: number of requests that have not ended.
        keepers: number of other processes whose requests may still come.
        on_work: called when the first request begins, and when the last one has ended.
    """

    def __init__(self, engine: E_co, number: int = 1, checkpoint: Checkpoint = None) -> None:
        self.engine = engine
        self.number = number
        self.checkpoint = checkpoint
        self.requests = 0
        self.keepers = 0
        self.on_work: Callable[[], None] = lambda: None
        self._released = asyncio.Event()
        # The last `move` to a state that the engine does not know, such as `unloaded`.
        self._beyond_engine: State | None = None
        # The state when last looked at, to check the next transition.
        self._noted: State = "loading"

    @property
    def state(self) -> State:
        """Return the current state, see `service.models.states`.

        In order of precedence: `leaving` or `gone` after such a `move`; `ready` if the engine is;
        the state of the last `move`; whether the engine has failed or is loading.
        """
        if self._beyond_engine in ("leaving", "gone"):
            return self._beyond_engine
        if self.engine.ready:
            return "ready"
        if self._beyond_engine is not None:
            return self._beyond_engine
        return "failed" if self.engine.status.state == "failed" else "loading"

    def move(self, state: State) -> None:
        """Change to a state that the engine does not know, or from `unloaded` to `loading`."""
        before = self.state
        if state == before:
            return
        require_transition(before, state)
        self._beyond_engine = None if state == "loading" else state
        self._noted = state

    def note_engine(self) -> tuple[State, State]:
        """Note a change of the engine, and return the states before and after it."""
        before = self._noted
        after = self.state
        if after != before:
            require_transition(before, after)
            self._noted = after
        return before, after

    @contextmanager
    def request(self) -> Iterator[E_co]:
        """Keep the generation until the context ends; the engine is the context."""
        self.begin()
        try:
            yield self.engine
        finally:
            self.end()

    def begin(self) -> None:
        """Keep the generation for a request until its `end`."""
        self.requests += 1
        if self.requests == 1:
            self.on_work()

    def end(self) -> None:
        """Release the generation from a request."""
        self.requests -= 1
        if not self.requests:
            self._released.set()
            self.on_work()

    def keep(self) -> None:
        """Keep the generation for the requests of another process, until its `drop`."""
        self.keepers += 1

    def drop(self) -> None:
        """Release the generation from another process."""
        self.keepers -= 1
        self._released.set()

    async def idle(self) -> None:
        """Wait until no request is left, and no other process keeps the generation."""
        while self.requests or self.keepers:
            self._released.clear()
            await self._released.wait()


class ServedModel:
    """A name that is served.

    Attributes:
        current: the generation that new requests belong to.
        is_being_replaced: whether another version is being loaded in place of an unloaded one, and
            new requests wait for that version.
    """

    current: Generation[Engine]
    is_being_replaced = False
    _info: ModelInfo | None = None

    def __init__(self) -> None:
        self._tasks = Tasks()

    @property
    def info(self) -> ModelInfo | None:
        """Return the description of the current version, or of the last one that was loaded."""
        self._info = self.current.engine.info or self._info
        return self._info

    @property
    def state(self) -> ModelState:
        """Return the state in which the name is listed."""
        match self.current.state:
            case "leaving" | "gone":  # the service stops
                return "ready" if self.current.engine.ready else "loading"
            case "unloaded" if self.is_being_replaced:
                return "loading"
            case state:
                return state


@dataclass(slots=True)
class Lease:
    """A model that a request holds, from its headers to its answer.

    Attributes:
        models: the models of the service.
        generation: the version that the request belongs to.
        info: the description of the model, or of the added head that the request names.
        added_head: the head that scores the features, if the request names an added head.
        is_loaded: whether the version could answer when it was acquired, or was loaded since.
    """

    models: Models
    generation: Generation[Engine]
    info: ModelInfo
    added_head: Head | None = None
    is_loaded: bool = True

    @property
    def engine(self) -> Engine:
        """Return the engine that computes the version."""
        return self.generation.engine

    async def load(self, caller: str) -> None:
        """Load the version if it is unloaded; it stays loaded until the release.

        Args:
            caller: see `Models.load`.

        Raises:
            EngineUnavailable: another version has replaced it meanwhile.
            What `Models.load` raises.
        """
        name = self.info.name
        if not self.engine.ready:  # else it is loaded, even if another model has its name by now
            try:
                await self.models.load(name, caller)
            except ServiceError:
                if not self.engine.ready:
                    raise
        info = self.engine.info if self.engine.ready else None
        if info is None or (info.content, info.head) != (self.info.content, self.info.head):
            raise EngineUnavailable(f"{name}: it was replaced while it was unloaded: try again")
        self.is_loaded = True

    def release(self) -> None:
        """Stop holding the version."""
        self.generation.end()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
