"""One name that is served, and its model's versions: a generation is one version, with an engine of
its own.

A request belongs to one generation from its head to its answer, and with it to its labels, input
size and preprocessing. The next generation is loaded beside the one that serves:

    load(checkpoint) --> prepare: read, check, warm up --> take over --> requests of the old one end
    --> it is closed
                           fails: CheckpointRefused, and the old one goes on

`LocalModel` has its engines in this process. With several processes it runs in each engine's
process, and `service.extensions.cluster.remote_model` is what web workers have in its place.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Generic, Literal, TypeVar

from service.background import Tasks
from service.engine.base import Engine
from service.engine.local import ModelEngine, What
from service.engine.messages import ModelInfo

logger = logging.getLogger("vitserve")

ModelState = Literal["ready", "loading", "unloaded", "failed"]

E_co = TypeVar("E_co", bound=Engine, covariant=True)


class Generation(Generic[E_co]):
    """One version of a model, and the requests that it answers.

    Attributes:
        engine: that computes it.
        number: counts up with each version that is loaded.
        checkpoint: what was loaded; None: the configured checkpoint.
        requests: those that have not ended.
        on_work: called when the first of them begins, and when the last one has ended.
        held: how many of them only keep it for another process, which may have no work for it.
    """

    def __init__(self, engine: E_co, number: int = 1, checkpoint: What = None) -> None:
        self.engine = engine
        self.number = number
        self.checkpoint = checkpoint
        self.requests = self.held = 0
        self.on_work: Callable[[], None] = lambda: None
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def request(self, *, held: bool = False) -> Iterator[None]:
        """Keep the generation until the context ends, whatever takes over meanwhile."""
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
        """Let a request go."""
        self.requests -= 1
        if not self.requests:
            self._idle.set()
            self.on_work()

    async def idle(self) -> None:
        """Return when no request is left."""
        while self.requests:
            await self._idle.wait()


class ServedModel:
    """A name that is served.

    Attributes:
        current: the generation that requests belong to which begin now.
        unloaded: whether its memory was given back until somebody asks for it.
        is_leaving: whether another version is being loaded in its place, for which it waits who
        asks now.
    """

    current: Generation[Engine]
    unloaded = is_leaving = False
    _info: ModelInfo | None = None

    def __init__(self) -> None:
        self._tasks = Tasks()

    @property
    def info(self) -> ModelInfo | None:
        """Return the description of what serves, or served last."""
        self._info = self.current.engine.info or self._info
        return self._info

    @property
    def state(self) -> ModelState:
        """Return whether it serves, or what it does instead."""
        engine = self.current.engine
        if engine.ready:
            return "ready"
        if self.unloaded and not self.is_leaving:
            return "unloaded"
        return "failed" if engine.status.state == "failed" else "loading"


class LocalModel(ServedModel):
    """A model whose engines run in this process.

    Args:
        make: returns an engine, not started yet, for a checkpoint (None: the configured
        checkpoint).
        checkpoint, number: of the first generation.
        on_retired: called when an old generation is closed and forgotten.

    Attributes:
        is_default: whether the process serves nothing where it cannot be loaded.
        broke: whether it failed after it had served.
        loaded: monotonic seconds of its last load, 0 before the first.
        on_change: called on the event loop when the state of the current generation changes, or
        another one is current.
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
        self._make, self._on_retired = make, on_retired
        self._open: set[Generation[ModelEngine]] = set()
        self.current = self.generation(checkpoint, number)
        self.is_default, self.broke = True, False
        self.loaded = 0.0
        self._last_used: float | None = None
        self.on_change: Callable[[], None] = lambda: None
        self._retiring: asyncio.Task[None] | None = None

    @property
    def last_used(self) -> float | None:
        """Return monotonic seconds of its last image, None before the first."""
        return self.current.engine.last_used or self._last_used

    def generation(self, checkpoint: What, number: int) -> Generation[ModelEngine]:
        """Return a version that is not loaded."""
        made = Generation(self._make(checkpoint), number, checkpoint)
        self._open.add(made)
        return made

    async def load(self, generation: Generation[ModelEngine]) -> str:
        """Load a version, and return why it does not serve, or an empty text."""
        ended = asyncio.Event()
        generation.engine.start(partial(self._changed, generation, ended))
        await ended.wait()
        return generation.engine.status.reason

    async def bring(self) -> str:
        """Load the current version, as it is not loaded; see `load`."""
        self.unloaded = False
        if self.current.engine.status.state == "failed":
            await self.forget(self._renew())
        return await self.load(self.current)

    def take_over(self, following: Generation[ModelEngine]) -> None:
        """Let a version that is loaded answer new requests; the one before is closed when its last
        request ended.
        """
        previous, self.current, self.unloaded = self.current, following, False
        self.is_leaving = False
        self._retiring = self._tasks.begin(self._retire(previous))

    async def unload(self) -> None:
        """Give its memory back, and return when its last request has ended; `bring` loads it again."""
        previous = self._renew()
        self.unloaded = True
        self.on_change()
        self._retiring = self._tasks.begin(self._retire(previous))
        await self.retired()

    @property
    def is_retiring(self) -> bool:
        """Return whether an old generation has requests left."""
        return self._retiring is not None and not self._retiring.done()

    async def retired(self) -> None:
        """Return when the last requests of the old generation have ended, and it is closed."""
        if self._retiring is not None:
            await asyncio.wait([self._retiring])

    async def leave(self) -> None:
        """Close it when its last request has ended, those of older generations too."""
        older = (generation.idle() for generation in self._open)
        await asyncio.gather(self._retire(self.current), self.retired(), *older)
        await self.close()

    async def close(self) -> None:
        """Close all generations."""
        self._tasks.cancel()
        await asyncio.gather(*(generation.engine.close() for generation in self._open))

    async def forget(self, generation: Generation[ModelEngine]) -> None:
        """Close a version that is not to answer any more."""
        await generation.engine.close()
        self._open.discard(generation)

    def _renew(self) -> Generation[ModelEngine]:
        """Let a generation that is not loaded take the place of the current one, which is returned."""
        previous, self._last_used = self.current, self.last_used
        self._info = self.info
        self.current = self.generation(previous.checkpoint, previous.number)
        return previous

    def _changed(self, generation: Generation[ModelEngine], ended: asyncio.Event) -> None:
        status, self.loaded = generation.engine.status, time.monotonic()
        if generation is self.current:
            self.broke = status.state == "failed" and ended.is_set()
            if self.broke or (status.state == "failed" and self.is_default):
                where = "" if status.device in ("auto", "cpu") else f" on {status.device}"
                what = f"engine {status.device}" if ended.is_set() else f"cannot start{where}"
                logger.critical("%s: %s", what, status.reason)
            self.on_change()
        ended.set()

    async def _retire(self, generation: Generation[ModelEngine]) -> None:
        await generation.idle()
        await self.forget(generation)
        self._on_retired()
        logger.info("the old model is closed")
