"""One name that is served, and its model's versions: a generation is one version, with an engine of its own.

A request belongs to one generation from its head to its answer, and with it to its labels, input size and
preprocessing. The next generation is loaded beside the one that serves:

    load(checkpoint) --> prepare: read, check, warm up --> take over --> requests of the old one end --> it is closed
                           fails: CheckpointRefused, and the old one goes on

`LocalModel` has its engines in this process. With several processes it runs in each engine's process, and
`service.cluster.remote_model` is what web workers have in its place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from service.engine.backbones import ModelEngine, What
from service.engine.base import Engine
from service.engine.messages import ModelInfo
from service.errors import CheckpointRefused, EngineUnavailable, SwapUnderWay
from service.models.tasks import Tasks

logger = logging.getLogger("vitserve")

LOAD_SECONDS: Final = 600.0
"""Seconds in which the next checkpoint must be loaded and warm, or it is refused. The first may take any time."""

UNDER_WAY: Final = "another checkpoint is being loaded: try again when that is done"

ModelState = Literal["ready", "loading", "unloaded", "failed"]

E_co = TypeVar("E_co", bound=Engine, covariant=True)


class Generation(Generic[E_co]):
    """One version of a model, and the requests that it answers.

    Attributes:
        number: counts up with each version that is loaded.
        checkpoint: what was loaded; None: the configured checkpoint.
        requests: those that have not ended.
        held: how many of them only keep it for another process, which may have no work for it.
    """

    def __init__(self, engine: E_co, number: int = 1, checkpoint: What = None) -> None:
        self._engine = engine
        self.number = number
        self.checkpoint = checkpoint
        self.requests = self.held = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def engine(self) -> E_co:
        """Return the engine that computes it."""
        return self._engine

    @contextmanager
    def request(self, *, held: bool = False) -> Iterator[None]:
        """Keep the generation until the context ends, whatever takes over meanwhile."""
        self.requests += 1
        self.held += held
        self._idle.clear()
        try:
            yield
        finally:
            self.requests -= 1
            self.held -= held
            if not self.requests:
                self._idle.set()

    async def idle(self) -> None:
        """Return when no request is left."""
        while self.requests:
            await self._idle.wait()


class Loads(NamedTuple):
    """Counts of the checkpoints that took over and that were refused since the start; whether the last one serves."""

    served: int = 0
    refused: int = 0
    last_successful: bool = True

    def counted(self, *, served: bool) -> Loads:
        """Return the counts with one load more."""
        return Loads(self.served + served, self.refused + (not served), served)


class ServedModel:
    """A name that is served.

    Attributes:
        current: the generation that requests belong to which begin now.
        loads: how many checkpoints took over since, or were refused.
        unloaded: whether its memory was given back until somebody asks for it.
    """

    current: Generation[Engine]
    loads = Loads()
    unloaded = False
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
        return "unloaded" if self.unloaded else "failed" if engine.status.state == "failed" else "loading"


class LocalModel(ServedModel):
    """A model whose engines run in this process.

    Args:
        make: returns an engine, not started yet, for a checkpoint (None: the configured checkpoint).
        checkpoint, number: of the first generation.
        on_retired: called when an old generation is closed and forgotten.
        load_seconds: see `LOAD_SECONDS`.

    Attributes:
        is_default: whether the process serves nothing where it cannot be loaded.
        broke: whether it failed after it had served.
        loaded: monotonic seconds of its last load, 0 before the first.
        on_change: called on the event loop when the state of the current generation changes, or another one is current.
    """

    current: Generation[ModelEngine]

    def __init__(
        self,
        make: Callable[[What], ModelEngine],
        checkpoint: What = None,
        number: int = 1,
        *,
        on_retired: Callable[[], None] = lambda: None,
        load_seconds: float = LOAD_SECONDS,
    ) -> None:
        super().__init__()
        self.current = Generation(make(checkpoint), number, checkpoint)
        self.next: Generation[ModelEngine] | None = None
        self.is_default, self.broke = True, False
        self.loaded = 0.0
        self._last_used: float | None = None
        self._make = make
        self._on_retired = on_retired
        self._load_seconds = load_seconds
        self.on_change: Callable[[], None] = lambda: None
        self._retiring: asyncio.Task[None] | None = None
        self._open = {self.current}

    @property
    def last_used(self) -> float | None:
        """Return monotonic seconds of its last image, None before the first."""
        return self.current.engine.last_used or self._last_used

    async def bring(self) -> str:
        """Load it, as it is not loaded, and return why it does not serve, or an empty text."""
        self.unloaded = False
        if self.current.engine.status.state == "failed":
            await self._forget(self._renew())
        await self._start(self.current).wait()
        return self.current.engine.status.reason

    async def unload(self) -> None:
        """Give its memory back, and return when its last request has ended; `bring` loads it again."""
        previous = self._renew()
        self.unloaded = True
        self.on_change()
        await asyncio.shield(self._tasks.begin(self._retire(previous)))

    async def leave(self) -> None:
        """Close it when its last request has ended."""
        await self._retire(self.current)
        await self.close()

    def _renew(self) -> Generation[ModelEngine]:
        """Let a generation that is not loaded take the place of the current one, which is returned."""
        previous, self._last_used = self.current, self.last_used
        self._info = self.info
        self.current = Generation(self._make(previous.checkpoint), previous.number, previous.checkpoint)
        self._open.add(self.current)
        return previous

    async def prepare(self, checkpoint: What) -> None:
        """Load a checkpoint beside the one that serves; it is `next`, and takes over or is discarded.

        Whoever cancels this call discards it, too.

        Raises:
            CheckpointRefused: it cannot be served; the old one goes on.
            SwapUnderWay: another checkpoint is being loaded.
            EngineUnavailable: no model is ready yet.
        """
        if self.next is not None:
            raise SwapUnderWay(UNDER_WAY)
        if not self.current.engine.ready:
            raise EngineUnavailable(self.current.engine.status.reason)
        named = checkpoint.get("checkpoint") if isinstance(checkpoint, Mapping) else checkpoint
        logger.info("loading %s beside the model that is served", named or "the configured checkpoint")
        self.next = following = Generation(self._make(checkpoint), self.current.number + 1, checkpoint)
        self._open.add(following)
        try:
            if self._retiring is not None:  # there are never three models in memory
                await asyncio.wait([self._retiring])
            ended = self._start(following)
            async with asyncio.timeout(self._load_seconds):
                await ended.wait()
            reason = following.engine.status.reason
        except TimeoutError:
            reason = f"it was not loaded and warm within {self._load_seconds:g} s"
        if reason:
            await self.discard(reason)
            raise CheckpointRefused(reason)

    def take_over(self) -> None:
        """Let `next` answer new requests; the old generation is closed when its last request ended."""
        assert self.next is not None, "it was prepared"
        previous, self.current, self.next = self.current, self.next, None
        self.loads = self.loads.counted(served=True)
        self.on_change()
        self._retiring = self._tasks.begin(self._retire(previous))

    async def discard(self, reason: str) -> None:
        """Close `next`, which is not to take over."""
        assert self.next is not None, "it is being prepared, or is"
        logger.error("the next checkpoint is refused, and the old one goes on: %s", reason)
        self.loads = self.loads.counted(served=False)
        discarded, self.next = self.next, None
        await self._forget(discarded)

    async def close(self) -> None:
        """Close all generations."""
        self._tasks.cancel()
        await asyncio.gather(*(generation.engine.close() for generation in self._open))

    def _start(self, generation: Generation[ModelEngine]) -> asyncio.Event:
        """Start a generation's engine; return the event that it is loaded, or has failed."""
        ended = asyncio.Event()
        generation.engine.start(partial(self._changed, generation, ended))
        return ended

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
        await self._forget(generation)
        self._on_retired()
        logger.info("the old model is closed")

    async def _forget(self, generation: Generation[ModelEngine]) -> None:
        await generation.engine.close()
        self._open.discard(generation)
