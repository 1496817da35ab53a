"""Swaps the model of a running service: the next model is loaded beside the old one, and takes over when it is warm.

A request belongs to one generation from its head to its answer: the engine, and with it labels, input size and
preprocessing. The old engine goes on for the requests that began with it, on batches of their own, and is closed when
the last of them has ended.

    load(checkpoint) --> next engine: read, check, warm up --> current = next --> requests of the old one end --> close
                           fails: CheckpointRefused, and the old one goes on
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Final, NamedTuple, Protocol

from service.engine.base import Engine
from service.errors import CheckpointRefused, EngineUnavailable, Forbidden, ServiceError, SwapUnderWay

logger = logging.getLogger("vitserve")

_BATCHES_AHEAD: Final = 4
"""Batches of each engine whose pictures are decoded, or being decoded, at once: two under way, and two that wait."""

UNDER_WAY: Final = "another checkpoint is being loaded: try again when that is done"


class Generation:
    """One model that is served, and how many requests it answers.

    Args:
        engine: computes it.
        on_count: called with the number of requests whenever it changes.
    """

    def __init__(self, engine: Engine, on_count: Callable[[int], None] = lambda count: None) -> None:
        self.engine = engine
        self.requests = 0
        self._on_count = on_count

    @cached_property
    def turns(self) -> asyncio.Semaphore:
        """Return the turns of pictures to be decoded and classified: enough that no batch lacks a picture.

        Decoding that runs further ahead would take the processors from the batches that are to be answered first.
        """
        assert self.engine.info is not None, "requests come to an engine that is ready"
        return asyncio.Semaphore(_BATCHES_AHEAD * self.engine.info.max_batch * len(self.engine.engines))

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keep the engine until the context ends, whatever takes over meanwhile."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.requests += change
        self._on_count(self.requests)


class Reloads(NamedTuple):
    """Counts of the checkpoints that took over and that were refused since the start; whether the last one serves."""

    served: int = 0
    refused: int = 0
    last_successful: bool = True


class Swappable(Protocol):
    """Owns the engines of a service whose model can be swapped."""

    current: Generation
    """What requests that begin now belong to."""

    @property
    def reloads(self) -> Reloads:
        """Return what became of the loads until now, over all processes."""

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading the configured checkpoint; `on_change` is called when the state of the current engine changes,
        or another engine is current.
        """

    async def load(self, checkpoint: str | None) -> None:
        """Load a checkpoint (None: the configured checkpoint), and return when it answers new requests.

        Raises:
            CheckpointRefused: it cannot be served; the old one goes on.
            SwapUnderWay: another checkpoint is being loaded.
            EngineUnavailable: no model is ready yet.
        """

    async def close(self) -> None:
        """Close all engines."""


class LocalSwap:
    """Swaps engines of this process.

    Args:
        make: returns an engine, not started yet, for a checkpoint (None: the configured checkpoint).
        on_retired: called when an old engine is closed and forgotten.
    """

    def __init__(self, make: Callable[[str | None], Engine], on_retired: Callable[[], None] = lambda: None) -> None:
        self._make = make
        self._on_retired = on_retired
        self._on_change: Callable[[], None] = lambda: None
        self._idle = asyncio.Event()
        self._swap: asyncio.Task[None] | None = None
        self._reload = False
        self._retirement: asyncio.Task[None] | None = None
        self._engines: list[Engine] = []
        self.reloads = Reloads()
        self.current = self._generation(None)

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading the configured checkpoint; see `Swappable.start`."""
        self._on_change = on_change
        self._start(self.current, lambda: None)

    async def load(self, checkpoint: str | None) -> None:
        """Load a checkpoint and let it take over; see `Swappable.load`. A caller who leaves does not end it."""
        await asyncio.shield(self._begin(checkpoint))

    def reload(self) -> None:
        """Begin to load the configured checkpoint as it is now, after what is being loaded; the log tells how it ends.

        What is being loaded may have been read before the file was replaced.
        """
        try:
            self._begin(None)
        except SwapUnderWay:
            self._reload = True
        except ServiceError as error:
            logger.warning("not reloaded: %s", error)

    def _begin(self, checkpoint: str | None) -> asyncio.Task[None]:
        if self._swap is not None:
            raise SwapUnderWay(UNDER_WAY)
        if not self.current.engine.ready:
            raise EngineUnavailable(self.current.engine.status.reason)
        logger.info("loading %s beside the model that is served", checkpoint or "the configured checkpoint")
        self._swap = asyncio.create_task(self._load(checkpoint))
        self._swap.add_done_callback(self._loaded)
        return self._swap

    async def close(self) -> None:
        """Close all engines."""
        for task in (self._swap, self._retirement):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(engine.close() for engine in self._engines))

    def _generation(self, checkpoint: str | None) -> Generation:
        engine = self._make(checkpoint)
        self._engines.append(engine)
        return Generation(engine, lambda count: None if count else self._idle.set())

    def _start(self, generation: Generation, changed: Callable[[], None]) -> None:
        def on_change() -> None:
            changed()
            if generation is self.current:
                self._on_change()

        generation.engine.start(on_change)

    async def _load(self, checkpoint: str | None) -> None:
        if self._retirement is not None:  # there are never three models in memory
            await self._retirement
        changed, following = asyncio.Event(), self._generation(checkpoint)
        self._start(following, changed.set)
        await changed.wait()
        if not following.engine.ready:
            reason = following.engine.status.reason
            await following.engine.close()
            self._engines.remove(following.engine)
            raise CheckpointRefused(reason)
        previous, self.current = self.current, following
        self._on_change()
        self._retirement = asyncio.create_task(self._retire(previous))

    def _loaded(self, swap: asyncio.Task[None]) -> None:
        self._swap = None
        if swap.cancelled():
            return
        error = swap.exception()
        if error is not None:
            logger.error("the next checkpoint is refused, and the old one goes on: %s", error)
        served, refused, _ = self.reloads
        self.reloads = Reloads(served + (error is None), refused + (error is not None), error is None)
        if self._reload:
            self._reload = False
            self.reload()

    async def _retire(self, generation: Generation) -> None:
        while generation.requests:
            self._idle.clear()
            await self._idle.wait()
        await generation.engine.close()
        self._engines.remove(generation.engine)
        self._on_retired()
        logger.info("the old model is closed, and its memory is free")


class Unswapped(LocalSwap):
    """An engine of this process that serves until the process ends."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(lambda checkpoint: engine)

    async def load(self, checkpoint: str | None) -> None:
        """Raise `Forbidden`: nothing is loaded beside the model."""
        raise Forbidden("here the checkpoint is not swapped: start the service again with another one")
