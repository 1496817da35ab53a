"""The supervisor's part in a swap: engines of the other group are started and take over, and the old engines are ended.

    IDLE -- a request, or SIGHUP --> LOADING -- all are ready --> TAKING_OVER -- all workers adopted it --> RETIRING
      ^                                |  one ended                                                            |
      |                                v                                                                       |
      +------- all have ended ---- CLEARING                                                                    |
      +------- all have ended ---- the last request of the old generation has its answer ----------------------+

The old engines serve until the last request that began with them has ended, and are ended only then, so that their
memory is given back with their processes. There are never three generations.
"""

from __future__ import annotations

import enum
import logging
import signal
from collections.abc import Sequence
from typing import Final

from service.cluster.channel import EngineChannel
from service.cluster.heartbeat import Pulse
from service.cluster.processes import OperatingSystem
from service.cluster.shared_resources import SharedResources
from service.cluster.supervisor import Child
from service.cluster.swap_board import CHANGED, Request, Verdict
from service.engine.swapping import UNDER_WAY

logger = logging.getLogger("vitserve")

_GRACE: Final = 30.0
"""Seconds in which an old engine ends by itself."""


class _Phase(enum.Enum):
    IDLE = enum.auto()
    LOADING = enum.auto()
    TAKING_OVER = enum.auto()
    RETIRING = enum.auto()
    CLEARING = enum.auto()
    OVER = enum.auto()


class Swap:
    """Swaps the checkpoint when a worker or the operator asks for it; `tick` is called at least every second.

    Args:
        groups: the engines of each group, by device; those of the second are not started yet.
        checkpoint: the configured checkpoint.
    """

    def __init__(
        self,
        shared: SharedResources,
        groups: Sequence[Sequence[Child]],
        workers: Sequence[Child],
        system: OperatingSystem,
        checkpoint: str,
    ) -> None:
        self._shared = shared
        self._board = shared.board
        self._groups = groups
        self._workers = workers
        self._system = system
        self._checkpoint = checkpoint
        self._phase = _Phase.IDLE
        self._other = 1
        self._request: Request | None = None
        self._reload = False
        self._stop_by: float | None = None

    def reload(self) -> None:
        """Load the configured checkpoint again, after what is being loaded."""
        self._reload = True

    def abandon(self) -> None:
        """Begin nothing more, and say so to who waits: the service ends, and all engines with it."""
        self._phase = _Phase.OVER
        for request in self._board.requests():
            self._board.reply(request, Verdict.REFUSED, "the service is about to stop")

    def tick(self) -> None:
        """Look at the engines and the workers, and do what is due."""
        match self._phase:
            case _Phase.IDLE:
                self._begin_if_requested()
            case _Phase.LOADING:
                self._refuse_others()
                self._look_at_loading()
            case _Phase.TAKING_OVER:
                self._refuse_others()
                # A worker that does not serve at the moment takes over, too.
                if self._board.all_adopted(self._shared.counters.worker_state > 0):
                    self._answer(Verdict.SERVED)
                    self._phase = _Phase.RETIRING
            case _Phase.RETIRING:
                if self._stop_by is not None or self._board.in_progress(self._other) == 0:
                    self._end_others()
            case _Phase.CLEARING:
                self._end_others(signal.SIGKILL)

    def _begin_if_requested(self) -> None:
        request = next(iter(self._board.requests()), None)
        if request is None and not self._reload:
            return
        if not all(child.is_running() for child in self._groups[self._board.group]):
            # Soon they run, or the service ends.
            return
        self._reload &= request is not None
        self._request = request
        checkpoint = (request and request.checkpoint) or self._checkpoint
        self._other = self._board.begin(checkpoint)
        logger.info("loading %s beside the model that is served", checkpoint)
        for channel, following in zip(*self._channels(), strict=True):
            # What the device has not allowed for one model, it will not for another.
            following.options.write(channel.options.read())
            following.failure.write("")
        for child in self._groups[self._other]:
            child.start_at, child.ever_ran = self._system.now(), False
            child.delay, child.failures, child.pulse = 0.0, 0, Pulse()
        self._phase = _Phase.LOADING

    def _look_at_loading(self) -> None:
        children = self._groups[self._other]
        refusal = self._refusal()
        if refusal or any(child.pid is None and child.start_at is None for child in children):
            reason = refusal or "an engine ended before it was ready"
            logger.error("the next checkpoint is refused, and the old one goes on: %s", reason)
            self._board.refuse()
            self._answer(Verdict.REFUSED, reason)
            self._phase = _Phase.CLEARING
            self._end_others(signal.SIGKILL)
        elif all(child.is_running() for child in children):
            old = self._board.group
            for child in children:
                child.spare = False
            for child in self._groups[old]:
                child.spare, child.start_at = True, None
            self._board.take_over()
            self._other = old
            self._wake_workers()
            self._phase = _Phase.TAKING_OVER

    def _channels(self) -> tuple[list[EngineChannel], list[EngineChannel]]:
        """Return the channels of the group that serves and of the other group."""
        return self._shared.groups[self._board.group], self._shared.groups[self._other]

    def _refusal(self) -> str:
        """Return why an engine of the other group cannot serve its checkpoint; empty as far as is known."""
        for channel, following in zip(*self._channels(), strict=True):
            if channel.changed_options().get("max_batch") != following.changed_options().get("max_batch"):
                return f"{channel.device}: not enough memory beside the model that is served"
            if failure := following.failure.read():
                return failure
        return ""

    def _wake_workers(self) -> None:
        for child, state in zip(self._workers, self._shared.counters.worker_state, strict=True):
            if child.pid is not None and state:  # before that the signal would end it
                self._system.kill(child.pid, CHANGED)

    def _refuse_others(self) -> None:
        for request in self._board.requests():
            if request != self._request:
                self._board.reply(request, Verdict.UNDER_WAY, UNDER_WAY)

    def _answer(self, verdict: Verdict, reason: str = "") -> None:
        if self._request is not None:
            self._board.reply(self._request, verdict, reason)

    def _end_others(self, number: signal.Signals | None = None) -> None:
        """End the engines that do not serve, with their own signal or the given signal."""
        now = self._system.now()
        first = self._stop_by is None
        if self._stop_by is None:
            self._stop_by = now + _GRACE
        alive = [child for child in self._groups[self._other] if child.pid is not None]
        for child in self._groups[self._other]:
            child.start_at = None
        for child in alive:
            if child.pid is not None and (first or now > self._stop_by):
                self._system.kill(child.pid, signal.SIGKILL if now > self._stop_by else number or child.stop)
        if not alive:
            self._stop_by = None
            for channel in self._shared.groups[self._other]:
                channel.pixels.empty()
            logger.info("the engines that no longer serve have ended")
            self._phase = _Phase.IDLE
