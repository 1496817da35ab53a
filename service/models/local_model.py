"""One name whose model's versions have their engines in this process.

The next version is loaded while the current one serves:

    prepare: read, check, warm up -> take over -> last request of the old one ends -> close it
             fails: CheckpointRefused, and the old one stays
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from service.engine.backbones import Checkpoint, ModelEngine
from service.engine.messages import EngineStatus
from service.models.generation import Generation, ServedModel

logger = logging.getLogger("vitserve")


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
        make: Callable[[Checkpoint], ModelEngine],
        checkpoint: Checkpoint = None,
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

    def generation(self, checkpoint: Checkpoint, number: int) -> Generation[ModelEngine]:
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

    def unload(self) -> None:
        """Give back its memory after its last request, see `retired`; `bring` loads it again."""
        previous = self._renew()
        self.current.move("unloaded")
        self._retiring = self._tasks.begin(self._retire(previous))
        self.on_change()

    @property
    def is_retiring(self) -> bool:
        """Return whether an old generation has requests left."""
        return self._retiring is not None and not self._retiring.done()

    async def retired(self, timeout: float | None = None) -> None:
        """Wait until the old generation's last requests have ended, and it is closed."""
        if self._retiring is not None:
            await asyncio.wait([self._retiring], timeout=timeout)

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
