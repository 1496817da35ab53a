"""The taught heads of a web process: read again when they change, and fitted by a child process when they have to be.

    change --> commit --> seen by every process of the service --> one of them starts the fit --> commit --> seen by all

The file of examples is all that processes share, so a service of several workers and replicas with one folder have the
same heads. A lock that the child holds makes it the only one that fits; whatever ends, the next look starts it again.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from model.errors import CheckpointError
from model.taught_heads import TaughtHead
from service.teach.examples import Examples, HeadRow

logger = logging.getLogger("vitserve")

_LOOK_SECONDS: Final = 0.25
_LOCK: Final = "fit.lock"
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Taught(NamedTuple):
    """A head as it is kept, and as it answers; None before its first fit."""

    row: HeadRow
    fitted: TaughtHead | None


class TaughtHeads:
    """The heads by name, as of the last look at the file.

    Args:
        examples: where they are kept.

    Attributes:
        on_change: called when they are others.
    """

    def __init__(self, examples: Examples) -> None:
        self.examples = examples
        self.heads: Mapping[str, Taught] = {}
        self.on_change: Callable[[], None] = lambda: None
        self._seen: int | None = None
        self._given_up: set[tuple[int, int]] = set()
        self._look = asyncio.Event()
        self._child: Process | None = None

    def changed(self) -> None:
        """Look at the file at once: this process has changed it."""
        self._look.set()

    @property
    def fitting(self) -> bool:
        """Return whether a child of this process is fitting."""
        return self._child is not None

    async def watch(self) -> None:
        """Look at the file again and again, until the task is cancelled."""
        try:
            while True:
                await self.look()
                self._look.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._look.wait(), _LOOK_SECONDS)
        finally:
            self.examples.close()
            if self._child is not None:
                with suppress(ProcessLookupError):
                    self._child.kill()

    async def look(self) -> None:
        """Read the heads if the file has changed, and start the fit of those whose examples have."""
        heads = await asyncio.to_thread(self._read)
        if heads is not self.heads:
            self.heads = heads
            self.on_change()
        stale = {(row.id, row.revision) for row, _ in self.heads.values() if row.fitted_revision < row.revision}
        if stale - self._given_up and self._child is None:
            await self._start(stale)

    def _read(self) -> Mapping[str, Taught]:
        version = self.examples.version()
        if version == self._seen:
            return self.heads
        self._seen = version
        return {name: Taught(row, self._fitted(row)) for name, row in self.examples.heads().items()}

    def _fitted(self, row: HeadRow) -> TaughtHead | None:
        """Return a head as it was last fitted: what is loaded already, if that is it."""
        loaded = self.heads.get(row.name)
        if loaded is not None and (loaded.row.id, loaded.row.fitted_revision) == (row.id, row.fitted_revision):
            return loaded.fitted
        content = self.examples.fitted(row)
        try:
            return None if content is None else TaughtHead.from_bytes(content, row.name)
        except CheckpointError as error:
            logger.error("%s", error)
            return None

    async def _start(self, stale: set[tuple[int, int]]) -> None:
        """Start the process that fits, unless one of any process of the service is at it."""
        lock = os.open(self.examples.path.with_name(_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            command = (sys.executable, "-m", "service.teach.fit", str(self.examples.path.parent))
            environment = {**os.environ, **_ONE_THREAD}
            self._child = await asyncio.create_subprocess_exec(
                *command, env=environment, stdin=DEVNULL, stdout=DEVNULL, pass_fds=(lock,)
            )
        except BlockingIOError:
            return
        finally:
            os.close(lock)
        self._waiter = asyncio.create_task(self._wait(self._child, stale))

    async def _wait(self, child: Process, stale: set[tuple[int, int]]) -> None:
        code = await child.wait()
        self._child = None
        if code:
            logger.error("the fit of taught heads ended with code %d: it is tried again when examples change", code)
            self._given_up = stale
        self._look.set()
