"""One name whose model's versions have their engines in this process.

The next version is loaded while the current one serves:

    new_version -> load: read, check, warm up -> take_over -> the old one retires
                     fails: the old one stays
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from service.engine.backbones import Checkpoint, ModelEngine
from service.models.retiring import OpenVersions
from service.models.served_model import ServedModel
from service.models.version import Version

logger = logging.getLogger("vitserve")


class LocalModel(ServedModel):
    """A model whose engines run in this process.

    Args:
        make: returns an engine, not started yet, for a checkpoint (None: the configured one).
        checkpoint: checkpoint of the first version.
        number: number of the first version.
        on_retired: see `OpenVersions`.

    Attributes:
        versions: its versions that are not closed.
        is_required: whether the process cannot serve without this model.
        broke: whether it failed after it had served.
        loaded: monotonic seconds of its last load, 0 before the first.
        on_change: called on the event loop when another version is current, or the current one's
            state changes.
    """

    current: Version[ModelEngine]

    def __init__(
        self,
        make: Callable[[Checkpoint], ModelEngine],
        checkpoint: Checkpoint = None,
        number: int = 1,
        *,
        on_retired: Callable[[], None] = lambda: None,
    ) -> None:
        self._make = make
        self.versions = OpenVersions(on_retired)
        self.current = self.new_version(checkpoint, number)
        self.is_required = True
        self.broke = False
        self.loaded = 0.0
        self._last_used: float | None = None
        self.on_change: Callable[[], None] = lambda: None

    @property
    def size(self) -> int:
        """Return the measured bytes of the current version's backbone."""
        return self.current.engine.size

    @property
    def last_used(self) -> float | None:
        """Return monotonic seconds of its last image, None before the first."""
        return self.current.engine.last_used or self._last_used

    # Loading

    def new_version(self, checkpoint: Checkpoint, number: int) -> Version[ModelEngine]:
        """Return a new version, which `load` loads."""
        version = Version(self._make(checkpoint), number, checkpoint)
        self.versions.open.add(version)
        return version

    async def load(self, version: Version[ModelEngine]) -> str:
        """Load a version; return an empty text, or the reason if it failed."""
        ended = asyncio.Event()
        version.engine.start(partial(self._changed, version, ended))
        await ended.wait()
        return version.engine.status.reason

    async def load_current(self) -> str:
        """Load the current version, which is unloaded or failed; return as `load`."""
        if self.current.state == "failed":
            await self.versions.close(self._replace_by_unloaded())
        self.current.move("loading")
        return await self.load(self.current)

    def _changed(self, version: Version[ModelEngine], ended: asyncio.Event) -> None:
        """Note that the engine of a version is ready, has failed, or is closed."""
        if version.engine.ready:
            self.loaded = time.monotonic()
        ended.set()
        if version is not self.current:
            return
        if version.state == "failed":
            status = version.engine.status
            self.broke = version.engine.info is not None
            if self.broke:
                logger.critical("engine %s: %s", status.device, status.reason)
            elif self.is_required:
                where = "" if status.device in ("auto", "cpu") else f" on {status.device}"
                logger.critical("cannot start%s: %s", where, status.reason)
        self.on_change()

    # Retiring

    def take_over(self, following: Version[ModelEngine]) -> None:
        """Make a loaded version current, and retire the version before it."""
        previous = self.current
        self.current = following
        self.is_being_replaced = False
        self.versions.retire(previous)

    def unload(self) -> None:
        """Retire the current version; `load_current` loads it again."""
        previous = self._replace_by_unloaded()
        self.current.move("unloaded")
        self.versions.retire(previous)
        self.on_change()

    def _replace_by_unloaded(self) -> Version[ModelEngine]:
        """Make a new version of the same number current; return the old one in its old state."""
        previous = self.current
        self._last_used = self.last_used
        self._info = self.info
        self.current = self.new_version(previous.checkpoint, previous.number)
        return previous
