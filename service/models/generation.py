"""One name that is served, and its model's versions: a generation is one version with an engine.

A request belongs to one generation from its headers to its answer, and so to its labels, input size
and preprocessing. The next generation is loaded while the current one serves:

    prepare: read, check, warm up -> take over -> last request of the old one ends -> close it
             fails: CheckpointRefused, and the old one stays

`service.models.states` draws the states of a generation. `LocalModel` has its engines in this
process. With several processes it runs in each engine's process, and web workers have
`service.extensions.cluster.remote_model` in its place.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from service.background import Tasks
from service.engine.backbones import ModelEngine, What
from service.engine.base import Engine
from service.engine.messages import EngineStatus, ModelInfo
from service.models.states import ModelState, State, require_transition

logger = logging.getLogger("vitserve")

E_co = TypeVar("E_co", bound=Engine, covariant=True)


class Version(NamedTuple):
    """A version of a model.

    Attributes:
        number: counts up with each version that is loaded.
        what: the loaded checkpoint, see `Models.put`; None for the configured one.
        gone: whether the model was deleted.
    """

    number: int = 1
    what: What = None
    gone: bool = False


class Generation(Generic[E_co]):
    """One version of a model, and the requests that it answers.

    Attributes:
        engine: computes the version.
        number: counts up with each version that is loaded.
        checkpoint: the loaded checkpoint; None for the configured one.
        requests: number of requests that have not ended.
        held: number of requests that only keep the version for another process, perhaps without
            work.
        on_work: called when the first request begins, and when the last one has ended.
    """

    def __init__(self, engine: E_co, number: int = 1, checkpoint: What = None) -> None:
        self.engine = engine
        self.number = number
        self.checkpoint = checkpoint
        self.requests = 0
        self.held = 0
        self.on_work: Callable[[], None] = lambda: None
        self._idle = asyncio.Event()
        self._idle.set()
        # The last `move` to a state that the engine does not know, such as `unloaded`.
        self._beyond_engine: State | None = None
        # The state when last looked at, to check the next transition.
        self._noted: State = "loading"

    @property
    def state(self) -> State:
        """Return the current state, see `service.models.states`.

        `leaving` and `gone` are final, whatever the engine does. Otherwise the engine tells
        whether it is ready. An engine that is not ready is unloaded or failed if a `move` has said
        so; else the engine tells whether it has failed or is loading.
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
    def request(self, *, held: bool = False) -> Iterator[None]:
        """Keep the generation until the context ends, even if the next one takes over."""
        self.begin()
        self.held += held
        try:
            yield
        finally:
            self.held -= held
            self.end()

    def begin(self) -> None:
        """Keep the generation for a request until its `end`."""
        self.requests += 1
        if self.requests == 1:
            self._idle.clear()
            self.on_work()

    def end(self) -> None:
        """Release the generation from a request."""
        self.requests -= 1
        if not self.requests:
            self._idle.set()
            self.on_work()

    async def idle(self) -> None:
        """Wait until no request is left."""
        while self.requests:
            await self._idle.wait()


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


class LocalModel(ServedModel):
    """A model whose engines run in this process.

    Args:
        make: returns an engine, not started yet, for a checkpoint (None: the configured one).
        checkpoint: checkpoint of the first generation.
        number: number of the first generation.
        on_retired: called when an old generation is closed and forgotten.

    Attributes:
        is_default: whether the process cannot serve without this model.
        broke: whether it failed after it had served.
        loaded: monotonic seconds of its last load, 0 before the first.
        on_change: called on the event loop when another generation is current, or the current one's
            state changes.
    """

    current: Generation[ModelEngine]

    def __init__(
        self,
        make: Callable[[What], ModelEngine],
        checkpoint: What = None,
        number: int = 1,
        *,
        on_retired: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._make = make
        self._on_retired = on_retired
        self._open: set[Generation[ModelEngine]] = set()
        self.current = self.generation(checkpoint, number)
        self.is_default = True
        self.broke = False
        self.loaded = 0.0
        self._last_used: float | None = None
        self.on_change: Callable[[], None] = lambda: None
        self._retiring: asyncio.Task[None] | None = None

    @property
    def last_used(self) -> float | None:
        """Return monotonic seconds of its last image, None before the first."""
        return self.current.engine.last_used or self._last_used

    def generation(self, checkpoint: What, number: int) -> Generation[ModelEngine]:
        """Return a new version, which `load` loads."""
        generation = Generation(self._make(checkpoint), number, checkpoint)
        self._open.add(generation)
        return generation

    async def load(self, generation: Generation[ModelEngine]) -> str:
        """Load a version; return an empty text, or the reason if it failed."""
        ended = asyncio.Event()
        generation.engine.start(partial(self._changed, generation, ended))
        await ended.wait()
        return generation.engine.status.reason

    async def bring(self) -> str:
        """Load the current version, which is unloaded or failed; return as `load`."""
        if self.current.state == "failed":
            await self.forget(self._renew())
        self.current.move("loading")
        return await self.load(self.current)

    def take_over(self, following: Generation[ModelEngine]) -> None:
        """Make a loaded version current; close the version before it after its last request."""
        previous = self.current
        self.current = following
        self.is_being_replaced = False
        self._retiring = self._tasks.begin(self._retire(previous))

    async def unload(self) -> None:
        """Give back its memory after its last request; `bring` loads it again."""
        previous = self._renew()
        self.current.move("unloaded")
        self.on_change()
        self._retiring = self._tasks.begin(self._retire(previous))
        await self.retired()

    @property
    def is_retiring(self) -> bool:
        """Return whether an old generation has requests left."""
        return self._retiring is not None and not self._retiring.done()

    async def retired(self) -> None:
        """Wait until the old generation's last requests have ended, and it is closed."""
        if self._retiring is not None:
            await asyncio.wait([self._retiring])

    async def leave(self) -> None:
        """Close all generations once their last requests have ended."""
        older = (generation.idle() for generation in self._open)
        await asyncio.gather(self._retire(self.current), self.retired(), *older)
        await self.close()

    async def close(self) -> None:
        """Close all generations, though they may have requests left."""
        self._tasks.cancel()
        await asyncio.gather(*map(self.forget, tuple(self._open)))

    async def forget(self, generation: Generation[ModelEngine]) -> None:
        """Close a version."""
        generation.move("leaving")
        await generation.engine.close()
        generation.move("gone")
        self._open.discard(generation)

    def _renew(self) -> Generation[ModelEngine]:
        """Replace the current generation by a new one of the same version; return the old one."""
        previous = self.current
        self._last_used = self.last_used
        self._info = self.info
        self.current = self.generation(previous.checkpoint, previous.number)
        return previous

    def _changed(self, generation: Generation[ModelEngine], ended: asyncio.Event) -> None:
        before, after = generation.note_engine()
        self.loaded = time.monotonic()
        if generation is self.current:
            self.broke = after == "failed" and before != "loading"
            if after == "failed":
                self._log_failure(generation.engine.status)
            self.on_change()
        ended.set()

    def _log_failure(self, status: EngineStatus) -> None:
        if self.broke:
            logger.critical("engine %s: %s", status.device, status.reason)
        elif self.is_default:
            where = "" if status.device in ("auto", "cpu") else f" on {status.device}"
            logger.critical("cannot start%s: %s", where, status.reason)

    async def _retire(self, generation: Generation[ModelEngine]) -> None:
        generation.move("leaving")
        await generation.idle()
        await self.forget(generation)
        self._on_retired()
        logger.info("the old model is closed")


class Prepared(NamedTuple):
    """A version of a model that is being loaded, or is loaded and has not taken over."""

    key: str
    model: LocalModel
    following: Generation[ModelEngine]

    @property
    def is_new(self) -> bool:
        """Return whether this is the first version of the model."""
        return self.following is self.model.current
