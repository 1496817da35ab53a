"""The models of a web worker: the engine processes hold them, one process per device.

The engines load, replace and close generations (`service.models`). Frames tell a worker which
generation of each model serves. New requests belong to the newest generation that any engine
serves. The worker releases the old generation after its own last request of it. The worker that is
asked for a swap leads it: all engines load, and then all take over. If one engine fails, none takes
over.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from service.engine.backbones import What
from service.engine.messages import EngineStatus
from service.errors import ServiceError, SwapUnderWay
from service.extensions.cluster import frames
from service.extensions.cluster.engine_client import EngineClient
from service.extensions.cluster.remote_engine import RemoteEngine
from service.models.generation import Generation, ServedModel
from service.models.registry import SWAP_UNDER_WAY, Models
from service.models.states import ModelState
from vitserve.documents import ListedModel

_RELOAD_SECONDS: Final = 0.5


class RemoteModel(ServedModel):
    """A model whose engines run in other processes."""

    current: Generation[RemoteEngine]

    def __init__(self, engines: Sequence[EngineClient], name: str = "") -> None:
        super().__init__()
        self.engines = tuple(engines)
        self.name = name
        self.current = self._generation(0)
        self._open = [self.current]

    @property
    def state(self) -> ModelState:
        """Return `ready` if an engine serves the model; otherwise the first engine's state."""
        if self.current.engine.ready:
            return "ready"
        for engine in self.engines:
            if self.name in engine.listed:
                return engine.listed[self.name].state
        return "loading"

    async def replace(self, checkpoint: What) -> None:
        """Load a checkpoint on all engines, and make it take over; raises the errors of a load.

        Cancelling this coroutine cancels the loads.
        """
        what = dict(checkpoint) if isinstance(checkpoint, Mapping) else checkpoint
        try:
            await ask_all(self.engines, frames.Change("load", self.name, what))
        except ServiceError as error:
            discard = frames.Change("discard", what=str(error))
            await asyncio.gather(
                *(engine.ask(discard) for engine in self.engines), return_exceptions=True
            )
            raise
        await ask_all(self.engines, frames.Change("take_over", self.name))

    def refresh(self) -> None:
        """Adopt the newest served generation; if the current one was withdrawn, have none."""
        ready = [engine for engine in self.engines if engine.status.state == "ready"]
        newest = max((number for engine in ready for number in self._of(engine)), default=0)
        if newest not in (0, self.current.number):
            self._turn_to(newest)
        elif not newest and any(
            (self.name, self.current.number) in engine.withdrawn for engine in ready
        ):
            self._turn_to(self.current.number + 1)  # a number that no engine has
        for generation in self._open:
            generation.engine.refresh()
        self._use()

    def _of(self, engine: EngineClient) -> list[int]:
        """Return an engine's generations for new requests."""
        return [
            number
            for number in engine.models.get(self.name, {})
            if (self.name, number) not in engine.withdrawn
        ]

    def _turn_to(self, number: int) -> None:
        self._info = self.info
        previous = self.current
        self.current = self._generation(number)
        self._open.append(self.current)
        self._tasks.begin(self._release(previous))

    def _generation(self, number: int) -> Generation[RemoteEngine]:
        generation = Generation(RemoteEngine(self.engines, self.name, number), number)
        generation.on_work = self._use
        return generation

    def _use(self) -> None:
        oldest = min(generation.number for generation in self._open)
        busy = self.current.requests > 0
        for engine in self.engines:
            engine.use(self.name, self.current.number, oldest, busy=busy)

    async def _release(self, previous: Generation[RemoteEngine]) -> None:
        await previous.idle()
        self._open.remove(previous)
        self._use()


async def ask_all(engines: Sequence[EngineClient], request: frames.Request) -> None:
    """Send a request to all engines; raises the first error, and cancels the other requests."""
    try:
        async with asyncio.TaskGroup() as group:
            for engine in engines:
                group.create_task(engine.ask(request))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


class RemoteModels(Models):
    """The models whose engines run in other processes; follows the lists of these engines."""

    served: dict[str, RemoteModel]  # type: ignore[assignment]

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = tuple(engines)
        super().__init__({"": RemoteModel(engines)})
        self._known: dict[str, RemoteModel] = {}  # deleted models, too: they may have requests left
        self._leading = asyncio.Lock()

    def status_of(self, key: str) -> ListedModel:
        """Return the status of a served model from the first engine that lists it."""
        for engine in self.engines:
            if key in engine.listed:
                return engine.listed[key]
        return super().status_of(key)

    def statuses(self) -> list[EngineStatus]:
        """Return the statuses of all engines."""
        return [engine.status for engine in self.engines]

    def start(self, on_change: Callable[[], None]) -> None:
        """Connect to the engines; see `Models.start`."""
        self.on_change = on_change
        for engine in self.engines:
            engine.start(self._changed)

    async def close(self) -> None:
        """Disconnect from all engines."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def load(self, name: str | None, caller: str = "") -> None:
        """Wait until an engine has the model, see `Models.load`; raises `UnknownModel`."""
        while True:
            change = frames.Change("wake", self.key(name), caller=caller)
            requests = (engine.ask(change) for engine in self.engines)
            results = await asyncio.gather(*requests, return_exceptions=True)
            errors = [error for error in results if error is not None]
            if self.served[self.key(name)].current.engine.ready:  # raises if it was deleted
                return
            if errors:
                raise errors[0]
            # The model was evicted again: repeat.

    async def put(self, name: str, what: What) -> bool:
        """Load a model on all engines or none, see `Models.put`; a disconnect does not stop it."""
        key = self.key(name, is_new=True)
        is_new = key not in self.served
        model = self.served.get(key) or RemoteModel(self.engines, key)
        await asyncio.shield(self._tasks.begin(self._lead(model, what)))
        return is_new

    async def unload(self, name: str) -> None:
        """Unload a model on all engines; see `Models.unload`."""
        self._require_changeable(name)
        await ask_all(self.engines, frames.Change("unload", name))

    async def delete(self, name: str) -> None:
        """Delete a model on all engines; see `Models.delete`."""
        self._require_changeable(name)
        await ask_all(self.engines, frames.Change("delete", name))

    async def _read_again(self) -> None:
        try:
            if self.default_name:
                await ask_all(self.engines, frames.Change("reload"))
            else:
                await self._lead(self.served[""], None)
        except SwapUnderWay:
            self._reload_again = True
            await asyncio.sleep(_RELOAD_SECONDS)

    async def _lead(self, model: RemoteModel, what: What) -> None:
        if self._leading.locked():
            raise SwapUnderWay(SWAP_UNDER_WAY)
        async with self._leading:
            await model.replace(what)

    def _changed(self) -> None:
        """Update the models after a change of one engine's models or status."""
        listed: dict[str, ListedModel] = {}
        names: set[str] = set()
        for engine in self.engines:
            listed |= engine.listed
            names |= engine.models.keys() | engine.listed.keys()
        self.results = self.engines[0].tally  # the same on every engine
        self.refused = {key for engine in self.engines for key in engine.refused}
        self.default_name = next(
            (name for name, status in listed.items() if status.default), self.default_name
        )
        for name in (names or {""}) - self.served.keys():
            self.served[name] = self._known.setdefault(name, RemoteModel(self.engines, name))
        for model in self.served.values():
            model.refresh()
        if listed:
            for name in self.served.keys() - listed.keys() - {self.default_name}:
                self.served.pop(name)._info = None  # another model may get this name
        self.on_change()
