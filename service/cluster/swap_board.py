"""The shared memory by which a service of several processes agrees on the checkpoint that it serves.

Each device has an engine in one of two groups. While a checkpoint is swapped, the next one is loaded by the engines of
the other group; the generation's parity says which group is current. As in `service.cluster.shared_memory` a cell has
one writer: the supervisor, or the worker that it belongs to. A text is written before the cell that announces it.

    worker          supervisor
    ------          ----------
    ask()     ---->  requests()
                     begin(): the checkpoint of the engines of the other group, which are started
                     take_over(): the next generation
    adopt()   ---->  all_adopted()
    count()   ---->  in_progress(group): requests that began with the old generation
    answer()  <----  reply()
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.cluster.shared_memory import SharedText, shared_zeros
from service.engine.swapping import Reloads

GROUPS = 2

CHANGED = signal.SIGUSR1
"""Tells the supervisor, or a worker that serves, to look at what others have written."""


class Verdict(enum.IntEnum):
    """What became of a request to load a checkpoint."""

    SERVED = 1
    REFUSED = 2
    UNDER_WAY = 3


@dataclass(frozen=True)
class Request:
    """A worker's request to load a checkpoint; an empty name stands for the configured checkpoint."""

    worker: int
    ticket: int
    checkpoint: str


class SwapBoard:
    """Cells and texts; made before the processes are forked.

    Args:
        checkpoint: the configured checkpoint.
    """

    def __init__(self, checkpoint: str, *, workers: int) -> None:
        self.checkpoints = [SharedText(checkpoint) for _ in range(GROUPS)]
        self._generation, self._refused, self._last_refused = shared_zeros(3, 1)
        self._adopted, self._tickets, self._answered, self._verdicts = shared_zeros(4, workers)
        self._in_progress = shared_zeros(workers, GROUPS)
        self._requested = [SharedText() for _ in range(workers)]
        self._reasons = [SharedText() for _ in range(workers)]

    @property
    def generation(self) -> int:
        """Return the number of checkpoints that have taken over since the start."""
        return int(self._generation[0])

    @property
    def group(self) -> int:
        """Return the group whose engines serve."""
        return self.generation % GROUPS

    @property
    def reloads(self) -> Reloads:
        """Return what became of the loads until now."""
        return Reloads(self.generation, int(self._refused[0]), not self._last_refused[0])

    # The worker's side.

    def ask(self, worker: int, checkpoint: str) -> int:
        """Ask for a checkpoint to be loaded, and return the ticket of the request."""
        self._requested[worker].write(checkpoint)
        self._tickets[worker] += 1
        return int(self._tickets[worker])

    def answer(self, worker: int, ticket: int) -> tuple[Verdict, str] | None:
        """Return what became of a request, and why; None as long as it is not decided."""
        if int(self._answered[worker]) != ticket:
            return None
        return Verdict(int(self._verdicts[worker])), self._reasons[worker].read()

    def adopt(self, worker: int, generation: int) -> None:
        """Tell that a worker's requests belong to this generation from now on."""
        self._adopted[worker] = generation

    def count(self, worker: int, group: int, requests: int) -> None:
        """Tell how many of a worker's requests are answered by a group."""
        self._in_progress[worker, group] = requests

    # The supervisor's side.

    def begin(self, checkpoint: str) -> int:
        """Let the engines of the other group load a checkpoint when they start, and return that group."""
        following = (self.generation + 1) % GROUPS
        self.checkpoints[following].write(checkpoint)
        return following

    def take_over(self) -> None:
        """Make the other group current."""
        self._generation[0] += 1
        self._last_refused[0] = 0

    def refuse(self) -> None:
        """Count a checkpoint that cannot be served."""
        self._refused[0] += 1
        self._last_refused[0] = 1

    def requests(self) -> list[Request]:
        """Return the requests that are not answered."""
        return [
            Request(worker, int(self._tickets[worker]), self._requested[worker].read())
            for worker in np.flatnonzero(self._tickets != self._answered).tolist()
        ]

    def reply(self, request: Request, verdict: Verdict, reason: str = "") -> None:
        """Answer a request."""
        self._reasons[request.worker].write(reason)
        self._verdicts[request.worker] = verdict
        self._answered[request.worker] = request.ticket

    def all_adopted(self, running: NDArray[np.bool_]) -> bool:
        """Return whether all workers that run, bool [workers], give requests to the current generation."""
        return bool((self._adopted[running] == self.generation).all())

    def in_progress(self, group: int) -> int:
        """Return the requests that a group's engines answer, over all workers."""
        return int(self._in_progress[:, group].sum())

    def forget_worker(self, worker: int) -> None:
        """Clear what a worker that ended had: its requests are gone, and nobody waits for its checkpoint."""
        self._in_progress[worker] = 0
        self._answered[worker] = self._tickets[worker]
