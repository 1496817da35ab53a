"""One version of a model, which `service.models.states` draws, and the requests that hold it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from service.engine.backbones import Checkpoint
from service.engine.base import Engine
from service.models.states import State, require_transition

E_co = TypeVar("E_co", bound=Engine, covariant=True)


class Version(Generic[E_co]):
    """One version of a model, and the requests that it answers.

    Attributes:
        engine: computes the version.
        number: counts up with each version that is loaded.
        checkpoint: the loaded checkpoint; None for the configured one.
        requests: number of requests that have not ended.
        keepers: number of other processes whose requests may still come.
        on_work: called when the first request begins, and when the last one has ended.
    """

    def __init__(self, engine: E_co, number: int = 1, checkpoint: Checkpoint = None) -> None:
        self.engine = engine
        self.number = number
        self.checkpoint = checkpoint
        self.requests = 0
        self.keepers = 0
        self.on_work: Callable[[], None] = lambda: None
        self._released = asyncio.Event()
        # The last `move` to a state that the engine does not know, such as `unloaded`.
        self._beyond_engine: State | None = None
        # The state when last looked at, to check the next transition.
        self._noted: State = "loading"

    @property
    def state(self) -> State:
        """Return the current state, see `service.models.states`.

        In order of precedence: `leaving` or `gone` after such a `move`; `ready` if the engine is;
        the state of the last `move`; whether the engine has failed or is loading.
        """
        if self._beyond_engine in ("leaving", "gone"):
            return self._beyond_engine
        if self.engine.ready:
            return "ready"
        if self._beyond_engine is not None:
            return self._beyond_engine
        return "failed" if self.engine.status.state == "failed" else "loading"

    def move(self, state: State) -> None:
        """Change to a state that the engine does not know, or from `unloaded` to `loading`."""
        before = self.state
        if state == before:
            return
        require_transition(before, state)
        self._beyond_engine = None if state == "loading" else state
        self._noted = state

    def note_engine(self) -> tuple[State, State]:
        """Note a change of the engine, and return the states before and after it."""
        before = self._noted
        after = self.state
        if after != before:
            require_transition(before, after)
            self._noted = after
        return before, after

    @contextmanager
    def request(self) -> Iterator[E_co]:
        """Keep the version until the context ends; the engine is the context."""
        self.begin()
        try:
            yield self.engine
        finally:
            self.end()

    def begin(self) -> None:
        """Keep the version for a request until its `end`."""
        self.requests += 1
        if self.requests == 1:
            self.on_work()

    def end(self) -> None:
        """Release the version from a request."""
        self.requests -= 1
        if not self.requests:
            self._released.set()
            self.on_work()

    def keep(self) -> None:
        """Keep the version for the requests of another process, until its `drop`."""
        self.keepers += 1

    def drop(self) -> None:
        """Release the version from another process."""
        self.keepers -= 1
        self._released.set()

    async def idle(self) -> None:
        """Wait until no request is left, and no other process keeps the version."""
        while self.requests or self.keepers:
            self._released.clear()
            await self._released.wait()
