"""The models of a web worker: the engine processes hold them, one process per device.

The engines load, replace and close versions (`service.models`). An engine grants each worker a
lease on a version that serves, and recalls the lease when another version takes over or the model
is unloaded. New requests belong to the newest version. The worker returns a recalled lease after
its own last request, and the engine closes the version after the last return.

The worker that is asked for a swap leads it: all engines load, and then all take over. If one
engine fails, none takes over.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn

from service.engine.backbones import Checkpoint
from service.engine.messages import EngineStatus
from service.errors import ServiceError, SwapUnderWay
from service.extensions.cluster import frames
from service.extensions.cluster.engine_client import EngineClient, EngineLease
from service.extensions.cluster.remote_engine import RemoteEngine
from service.models.all_models import SWAP_UNDER_WAY, Models
from service.models.served_model import ModelState, ServedModel
from service.models.version import Version
from vitserve.documents import ListedModel

_RELOAD_SECONDS: Final = 0.5


class RemoteModel(ServedModel):
    """A model whose engines run in other processes."""

    current: Version[RemoteEngine]

    def __init__(self, engines: Sequence[EngineClient], name: str = "") -> None:
        self.engines = tuple(engines)
        self.name = name
        self.current = self._new_version()
        self._earlier: list[Version[RemoteEngine]] = []  # with requests left

    @property
    def state(self) -> ModelState:
        """Return `ready` if an engine serves the model; otherwise the first engine's state."""
        if self.current.engine.ready:
            return "ready"
        published = self._published()
        return "loading" if published is None else published.state

    def listed(self, name: str, *, is_default: bool) -> ListedModel:
        """Return the model's entry in the list of the first engine that has it."""
        return self._published() or super().listed(name, is_default=is_default)

    def _published(self) -> ListedModel | None:
        for engine in self.engines:
            if self.name in engine.published.models:
                return engine.published.models[self.name]
        return None

    async def replace(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint on all engines, and make it take over; raises the errors of a load.

        Cancelling this coroutine cancels the loads.
        """
        if isinstance(checkpoint, Mapping):
            checkpoint = dict(checkpoint)
        try:
            await ask_all(self.engines, frames.Change("load_next", self.name, checkpoint))
        except ServiceError as error:
            discard = frames.Change("discard", reason=str(error))
            await asyncio.gather(
                *(engine.ask(discard) for engine in self.engines), return_exceptions=True
            )
            raise
        await ask_all(self.engines, frames.Change("take_over", self.name))

    def refresh(self) -> None:
        """Give new requests to the newest version that engines have, perhaps to none.

        A version without leases becomes the next version, and its requests wait for that.
        """
        leases = self._newest()
        if leases != self.current.engine.engines:
            if self.current.engine.engines:
                self._info = self.info
                self._earlier.append(self.current)
                self.current = self._new_version()
            if leases:
                self.current.number = leases[0].number
                self.current.engine.serve(leases)
        self._report()

    def _newest(self) -> tuple[EngineLease, ...]:
        """Return the leases of the newest version, with equal content."""
        leases = [
            lease
            for engine in self.engines
            if engine.status.state == "ready"
            for lease in engine.leases.get(self.name, {}).values()
            if not lease.is_recalled
        ]
        newest = max((lease.number for lease in leases), default=0)
        leases = [lease for lease in leases if lease.number == newest]
        # Each engine reads its folders itself. If one engine failed to read a checkpoint, the same
        # number may mean different content from then on.
        contents = [lease.info.content for lease in leases]
        content = contents[0] if contents else ""
        if self.info is not None and self.info.content in contents:
            content = self.info.content
        return tuple(lease for lease in leases if lease.info.content == content)

    def _new_version(self) -> Version[RemoteEngine]:
        version = Version(RemoteEngine(self.engines), 0)
        version.on_work = self._report
        return version

    def _report(self) -> None:
        self._earlier = [version for version in self._earlier if version.requests]
        busy: set[EngineLease] = set()
        for version in (self.current, *self._earlier):
            if version.requests:
                busy.update(version.engine.engines)
        for engine in self.engines:
            for lease in list(engine.leases.get(self.name, {}).values()):
                lease.report(is_busy=lease in busy)


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
        """Wait until an engine has the model, see `Models.load`.

        It does not wait for the other engines. They may wait for the end of this request, which
        holds one of their older versions.
        """
        version = self.served[self.key(name)].current
        if version.engine.ready:
            return
        served = asyncio.create_task(version.engine.served.wait())
        loading = asyncio.create_task(self._load_all(name, caller))
        try:
            await asyncio.wait({served, loading}, return_when=asyncio.FIRST_COMPLETED)
            if not served.done():
                loading.result()
        finally:
            served.cancel()
            loading.cancel()

    async def _load_all(self, name: str | None, caller: str) -> NoReturn:
        """Load a model on all engines, again if it is evicted; raises the first error."""
        while True:
            load = frames.Change("load", self.key(name), caller=caller)
            requests = (engine.ask(load) for engine in self.engines)
            for error in await asyncio.gather(*requests, return_exceptions=True):
                if error is not None:
                    raise error

    async def put(self, name: str, checkpoint: Checkpoint) -> bool:
        """Load a model on all engines or none, see `Models.put`; a disconnect does not stop it."""
        key = self.key(name, is_new=True)
        is_new = key not in self.served
        model = self.served.get(key) or RemoteModel(self.engines, key)
        await asyncio.shield(self._tasks.begin(self._lead(model, checkpoint)))
        return is_new

    async def unload(self, name: str) -> None:
        """Unload a model on all engines; see `Models.unload`."""
        self.require_changeable(name)
        await ask_all(self.engines, frames.Change("unload", name))

    async def delete(self, name: str) -> None:
        """Delete a model on all engines; see `Models.delete`."""
        self.require_changeable(name)
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

    async def _lead(self, model: RemoteModel, checkpoint: Checkpoint) -> None:
        if self._leading.locked():
            raise SwapUnderWay(SWAP_UNDER_WAY)
        async with self._leading:
            await model.replace(checkpoint)

    def _changed(self) -> None:
        """Update the models after a change of one engine's models or status."""
        published = [engine.published for engine in self.engines]
        listed: dict[str, ListedModel] = {}
        for engine in published:
            listed |= engine.models
        self.results = published[0].tally  # the same on every engine
        self.refused = {key for engine in published for key in engine.refused}
        self.default_name = next(
            (name for name, status in listed.items() if status.default), self.default_name
        )
        for name in listed.keys() - self.served.keys():
            self.served[name] = self._known.setdefault(name, RemoteModel(self.engines, name))
        for model in self.served.values():
            model.refresh()
        if listed:
            for name in self.served.keys() - listed.keys() - {self.default_name}:
                self.served.pop(name)._info = None  # another model may get this name
        self.on_change()
