"""A web worker's part in a swap: it asks the supervisor to load, and the current engines to compute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from service.cluster.swap_board import GROUPS, SwapBoard, Verdict
from service.engine.base import Engine
from service.engine.swapping import UNDER_WAY, Generation, Reloads
from service.errors import CheckpointRefused, SwapUnderWay

_LOOK_SECONDS: Final = 0.05


class RemoteSwap:
    """The engines of other processes, in two groups; one group is current.

    Args:
        groups: the engine of each group.
        wake: lets the supervisor look at the board.
    """

    def __init__(self, board: SwapBoard, worker: int, groups: Sequence[Engine], wake: Callable[[], None]) -> None:
        self._board = board
        self._worker = worker
        self._wake = wake
        self._loading = False
        self._on_change: Callable[[], None] = lambda: None
        self._groups = [Generation(engine, partial(self._count, group)) for group, engine in enumerate(groups)]
        self._number = board.generation
        self.current = self._groups[self._number % GROUPS]
        board.adopt(worker, self._number)

    @property
    def reloads(self) -> Reloads:
        """Return what became of the loads until now, of all workers."""
        return self._board.reloads

    def start(self, on_change: Callable[[], None]) -> None:
        """Connect to the engines of both groups; see `Swappable.start`."""
        self._on_change = on_change
        for generation in self._groups:
            generation.engine.start(partial(self._changed, generation))

    def adopt(self) -> None:
        """Give requests to the current generation as soon as all of its engines are ready for this worker."""
        number = self._board.generation
        following = self._groups[number % GROUPS]
        if number != self._number and all(engine.ready for engine in following.engine.engines):
            self._number, self.current = number, following
            self._board.adopt(self._worker, number)
            self._on_change()

    async def load(self, checkpoint: str | None) -> None:
        """Ask the supervisor to load a checkpoint, and wait until it serves; see `Swappable.load`."""
        if self._loading:
            raise SwapUnderWay(UNDER_WAY)
        self._loading = True
        try:
            ticket = self._board.ask(self._worker, checkpoint or "")
            self._wake()
            while (answer := self._board.answer(self._worker, ticket)) is None:
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self._loading = False
        verdict, reason = answer
        if verdict is not Verdict.SERVED:
            raise (CheckpointRefused if verdict is Verdict.REFUSED else SwapUnderWay)(reason)

    async def close(self) -> None:
        """Disconnect from all engines."""
        await asyncio.gather(*(generation.engine.close() for generation in self._groups))

    def _changed(self, generation: Generation) -> None:
        if generation is self.current:
            self._on_change()
        else:
            self._wake()  # the supervisor waits until all engines are ready
        self.adopt()

    def _count(self, group: int, requests: int) -> None:
        self._board.count(self._worker, group, requests)
        if not requests and group != self._number % GROUPS:  # the old engines may end
            self._wake()
