"""The open versions of one name: how a version retires, and who waits for that.

retire -> no new request holds it -> its last request ends -> close
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from service.background import Tasks
from service.engine.backbones import ModelEngine
from service.models.version import Version

logger = logging.getLogger("vitserve")

RETIRE_SECONDS: Final = 1.0
"""Seconds that a load waits for the last requests of the model that was unloaded for it."""


class OpenVersions:
    """The versions of one name whose engines are not closed.

    Args:
        on_retired: called when a retired version is closed.
    """

    def __init__(self, on_retired: Callable[[], None]) -> None:
        self.open: set[Version[ModelEngine]] = set()
        self._on_retired = on_retired
        self._tasks = Tasks()
        self._last: asyncio.Task[None] | None = None

    @property
    def is_retiring(self) -> bool:
        """Return whether the version that retired last is still open."""
        return self._last is not None and not self._last.done()

    def retire(self, version: Version[ModelEngine]) -> None:
        """Close a version in the background, after its last request."""
        self._last = self._tasks.begin(self._retire(version))

    async def retired(self, timeout: float | None = None) -> None:
        """Wait until the version that retired last is closed."""
        if self._last is not None:
            await asyncio.wait([self._last], timeout=timeout)

    async def retire_all(self, current: Version[ModelEngine]) -> None:
        """Close the current version and all others after their last requests."""
        older = (version.idle() for version in self.open)
        await asyncio.gather(self._retire(current), self.retired(), *older)
        await self.close_all()

    async def close(self, version: Version[ModelEngine]) -> None:
        """Close a version, even if requests hold it."""
        if version.state != "closed":
            version.move("retiring")
        await version.engine.close()
        version.move("closed")
        self.open.discard(version)

    async def close_all(self) -> None:
        """Close all versions, even if requests hold them."""
        self._tasks.cancel()
        await asyncio.gather(*map(self.close, tuple(self.open)))

    async def _retire(self, version: Version[ModelEngine]) -> None:
        version.move("retiring")
        await version.idle()
        await self.close(version)
        self._on_retired()
        logger.info("the old model is closed")
