"""What a web worker has in place of models in its own process: connections to the engine processes,
one a device.

The engines load, replace and close generations (`service.models`); a worker learns from frames
which generation of each model serves. New requests belong to the newest one that any engine serves;
the worker releases the old one when its own last request of it has ended. A swap is led by the
worker that is asked for it: all engines load, then all take over; when one fails, none does.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from model.images.preprocess import ModelInput
from service.background import keep_running
from service.engine.backbones import What
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.errors import EngineUnavailable, ServiceError, SwapUnderWay
from service.extensions.cluster import frames
from service.models.generation import Generation, ServedModel
from service.models.registry import SWAP_UNDER_WAY, Models
from service.models.residency import load_caller
from service.models.states import ModelState
from service.web.image_stores import StoreUsage
from vitserve.documents import ListedModel

logger = logging.getLogger(__name__)

CONNECTION_LOST: Final = "the engine ended and is being started again"
SILENT: Final = "the engine gives no sign of life"

_RETRY_SECONDS: Final = 0.1
_RELOAD_SECONDS: Final = 0.5

# An engine sends a sign of life every second. After this many looks without one it gets no new
# requests: 3 s. It is killed later, by the supervisor, as a busy machine delays a healthy engine
# too. Time for which this process stood still has no looks.
_LOOK_SECONDS: Final = 0.5
_MOST_SILENT_LOOKS: Final = 6


class EngineClient:
    """A connection to one engine process, and to its successor when it ends. Belongs to one event
    loop.

    Args:
        path: of the engine's socket.
        device: of the status until the engine says more.
    Attributes:
        models: the model of each generation that the engine has, by its name and number.
        withdrawn: those of them that are to get no new requests.
        pending: this worker's requests that have no outcome yet.
        listed, tally, refused, kept: as the engine published them last.
    """

    def __init__(self, path: Path, device: str) -> None:
        self.models: dict[str, dict[int, ModelInfo]] = {}
        self.withdrawn: set[tuple[str, int]] = set()
        self.listed: dict[str, ListedModel] = {}
        self.tally: dict[str, int] = {}
        self.refused: frozenset[str] = frozenset()
        self._published = EngineStatus(device, "loading", "the model is loading", "", None, 0)
        self._silent_looks = 0
        self.kept = StoreUsage()
        self._path = path
        self._on_change: Callable[[], None] = lambda: None
        self._connection: frames.Connection | None = None
        self._uses: dict[str, tuple[int, int, bool]] = {}
        self.pending: dict[int, tuple[frames.Request, asyncio.Future[Any]]] = {}
        self._ids = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_silent(self) -> bool:
        """Return whether the engine is connected, and has given no sign of life for too long."""
        return self._silent_looks >= _MOST_SILENT_LOOKS

    @property
    def status(self) -> EngineStatus:
        """Return the status as the engine published it last; of a silent one, that it has failed."""
        if self.is_silent and self._published.state == "ready":
            return replace(self._published, state="failed", reason=SILENT)
        return self._published

    @property
    def info(self) -> ModelInfo | None:
        """Return the description of the newest version of the default model; None before it is
        loaded.
        """
        default = self.models.get(
            next((name for name, status in self.listed.items() if status.default), ""), {}
        )
        return default[max(default)] if default else None

    def start(self, on_change: Callable[[], None]) -> None:
        """Connect, and connect again whenever the connection ends; `on_change` is called when the
        status changes.
        """
        self._on_change = on_change
        self._tasks = [
            keep_running("engine-connection", self._stay_connected),
            keep_running("engine-silence", self._watch),
        ]

    def send(self, frame: frames.Frame) -> None:
        """Send a frame; raises `EngineUnavailable` without a connection."""
        if self._connection is None:
            raise EngineUnavailable(self.status.reason or CONNECTION_LOST)
        self._connection.send(frame)

    async def ask(self, request: frames.Request) -> Any:
        """Make a request, and return its result; raises the error that is its answer.

        Raises:
            EngineUnavailable: the engine is gone, or silent; a load that is given up is discarded
            even there.
        """
        is_discard = isinstance(request, frames.Change) and request.act == "discard"
        if self.is_silent and not is_discard:
            raise EngineUnavailable(SILENT)
        id_ = next(self._ids)
        self.send(frames.Call(id_, request))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.pending[id_] = request, future
        try:
            return await future
        except asyncio.CancelledError:
            if self._connection is not None:
                self.send(frames.Cancel(id_))
            raise
        finally:
            self.pending.pop(id_, None)

    def use(self, name: str, newest: int, oldest: int, *, busy: bool) -> None:
        """Tell the engine once which generations of a model this worker uses, if it has any, and
        forget older ones.
        """
        of_model, busy = (
            self.models.get(name, {}),
            busy and len(self.models) > 1,
        )  # one alone is not unloaded
        is_known = newest in of_model or any(
            (name, number) in self.withdrawn for number in of_model
        )
        if is_known and self._uses.get(name) != (newest, oldest, busy):
            self._uses[name] = newest, oldest, busy
            for number in [number for number in of_model if number < oldest]:
                del of_model[number]
                self.withdrawn.discard((name, number))
            self.send(frames.Uses(name, newest, oldest, busy))

    async def close(self) -> None:
        """Disconnect; requests without an outcome are answered `EngineUnavailable`."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def look(self) -> None:
        """Count a look since the engine's last sign of life."""
        if self._connection is None or self.is_silent:
            return
        self._silent_looks += 1
        if self.is_silent:
            logger.warning(
                "engine %s: no sign of life: it gets no new requests", self._published.device
            )
            self._on_change()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look()

    async def _stay_connected(self) -> None:
        while True:
            try:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_unix_connection(
                    frames.Connection, str(self._path)
                )
            except OSError:  # it is being started
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            self._connection = connection
            try:
                async for frame in connection:
                    self._hear()
                    self._receive(frame)
            except frames.FrameError as error:
                logger.error("connection to an engine: %s", error)
            finally:
                self._disconnected()
            await asyncio.sleep(_RETRY_SECONDS)

    def _disconnected(self) -> None:
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        self.models.clear()
        self.withdrawn.clear()
        self._uses.clear()
        self._silent_looks = 0
        for _, future in self.pending.values():
            if not future.done():
                future.set_exception(EngineUnavailable(CONNECTION_LOST))
        if self._published.state != "closed":  # else it has said so
            self._published = replace(
                self._published, state="failed", reason=CONNECTION_LOST, queue_depth=0
            )
        self._on_change()

    def _hear(self) -> None:
        """Note a sign of life."""
        was_silent = self.is_silent
        self._silent_looks = 0
        if was_silent:
            logger.warning("engine %s: it gives signs of life again", self._published.device)
            self._on_change()

    def _receive(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Alive():
                pass
            case frames.StatusChanged(status, kept, listed, tally, refused):
                states = {name: each.state for name, each in listed.items()}
                changed = (
                    status.state != self._published.state
                    or states.keys() != self.listed.keys()
                    or tally != self.tally
                )
                self._published = status
                self.kept = kept
                self.listed = listed
                self.tally = tally
                self.refused = refused
                if changed:
                    self._on_change()
            case frames.Serving(model, generation, info):
                self.models.setdefault(model, {})[generation] = info
                self.withdrawn.discard((model, generation))
                self._uses.pop(model, None)
                if self._published.state == "ready":  # else the status follows
                    self._on_change()
            case frames.Withdrawn(model, generation):
                # And those before it, which it took over from though nobody here has turned to it
                # yet.
                known = (number for number in self.models.get(model, {}) if number <= generation)
                self.withdrawn.update((model, number) for number in (*known, generation))
                self._on_change()
            case frames.Answer() | frames.Failed():
                request, future = self.pending.get(frame.id, (None, None))
                if request is None or future is None or future.done():
                    return  # its caller went away
                if isinstance(frame, frames.Failed):
                    future.set_exception(frame.error())
                else:
                    future.set_result(frames.result_of(frame, request))
            case _:
                raise frames.FrameError(f"{type(frame).__name__} out of order")


class RemoteEngine:
    """One generation of a model on the engines of other processes; see
    `service.engine.base.Engine`.

    Each image goes to the engine, of those that have the generation, with the fewest of this
    worker's requests.
    """

    def __init__(self, engines: Sequence[EngineClient], name: str, generation: int) -> None:
        self.engines = engines
        self.info: ModelInfo | None = None
        self._name, self._generation = name, generation
        self._serving: list[EngineClient] = []
        self._turns = itertools.count()
        self.refresh()

    @property
    def ready(self) -> bool:
        """Return whether an engine has the generation and takes images."""
        return bool(self._serving)

    @property
    def status(self) -> EngineStatus:
        """Return the status of the first engine that serves, or else of the first one."""
        return (self._serving or self.engines)[0].status

    def refresh(self) -> None:
        """Look at the engines, one of which has changed."""
        name, number = self._name, self._generation
        having = [
            each
            for each in self.engines
            if number in each.models.get(name, {}) and each.status.state == "ready"
        ]
        # Engines that read their folders by themselves, and one of them could not, may count
        # differently from then on.
        contents = [each.models[name][number].content for each in having]
        if self.info is None or self.info.content not in contents:
            self.info = having[0].models[name][number] if having else self.info
        having = [
            each
            for each, own in zip(having, contents, strict=True)
            if self.info and own == self.info.content
        ]
        # One that withdraws it answers what has begun, where no other does.
        self._serving = [each for each in having if (name, number) not in each.withdrawn] or having
        infos = [engine.models[name][number] for engine in self._serving]
        if infos:
            self.info = replace(infos[0], device=",".join(info.device for info in infos))

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """See `Engine.infer`."""
        submit = frames.Submit.of(self._name, self._generation, request, timeout)
        result: InferenceResult = await self._least_loaded().ask(submit)
        return result

    async def embed_texts(self, texts: Sequence[str], *, timeout: float) -> NDArray[np.float32]:
        """See `Engine.embed_texts`; all workers ask the same engine, so that a text is computed
        once.
        """
        engine = self._serving[0] if self._serving else self._least_loaded()
        asked = frames.EmbedTexts(self._name, self._generation, tuple(texts), timeout)
        features: NDArray[np.float32] = await engine.ask(asked)
        return features

    def _least_loaded(self) -> EngineClient:
        """Return the engine with the fewest requests; of equals, the next in turn."""
        if not self._serving:
            raise EngineUnavailable(self.status.reason or "no engine has this model any more")
        first = next(self._turns) % len(self._serving)
        in_turn = self._serving[first:] + self._serving[:first]
        return min(in_turn, key=lambda engine: len(engine.pending))


class RemoteModel(ServedModel):
    """A model whose engines run in processes of their own; see the module's text."""

    current: Generation[RemoteEngine]

    def __init__(self, engines: Sequence[EngineClient], name: str = "") -> None:
        super().__init__()
        self.engines, self.name = tuple(engines), name
        self.current = self._generation(0)
        self._open = [self.current]

    @property
    def state(self) -> ModelState:
        """Return whether an engine serves it, or else what the first one says."""
        listed = [engine.listed[self.name] for engine in self.engines if self.name in engine.listed]
        return "ready" if self.current.engine.ready else listed[0].state if listed else "loading"

    async def replace(self, checkpoint: What) -> None:
        """Let all engines load a checkpoint, and then take over; who is cancelled ends it, and it
        raises as a load.
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
        """Adopt the newest generation that an engine serves, or none where it was withdrawn."""
        ready = [engine for engine in self.engines if engine.status.state == "ready"]
        newest = max((number for engine in ready for number in self._of(engine)), default=0)
        if newest not in (0, self.current.number):
            self._turn_to(newest)
        elif not newest and any(
            (self.name, self.current.number) in engine.withdrawn for engine in ready
        ):
            self._turn_to(self.current.number + 1)  # which nobody has
        for generation in self._open:
            generation.engine.refresh()
        self._use()

    def _of(self, engine: EngineClient) -> list[int]:
        """Return the generations that an engine has for new requests."""
        return [
            each
            for each in engine.models.get(self.name, {})
            if (self.name, each) not in engine.withdrawn
        ]

    def _turn_to(self, number: int) -> None:
        self._info = self.info
        previous, self.current = self.current, self._generation(number)
        self._open.append(self.current)
        self._tasks.begin(self._release(previous))

    def _generation(self, number: int) -> Generation[RemoteEngine]:
        generation = Generation(RemoteEngine(self.engines, self.name, number), number)
        generation.on_work = self._use
        return generation

    def _use(self) -> None:
        oldest, busy = (
            min(generation.number for generation in self._open),
            self.current.requests > 0,
        )
        for engine in self.engines:
            engine.use(self.name, self.current.number, oldest, busy=busy)

    async def _release(self, previous: Generation[RemoteEngine]) -> None:
        await previous.idle()
        self._open.remove(previous)
        self._use()


async def ask_all(engines: Sequence[EngineClient], request: frames.Request) -> None:
    """Ask all engines; raises the first error, and cancels what the others do."""
    try:
        async with asyncio.TaskGroup() as group:
            for engine in engines:
                group.create_task(engine.ask(request))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


class RemoteModels(Models):
    """The models whose engines run in processes of their own, as these list them."""

    served: dict[str, RemoteModel]  # type: ignore[assignment]  # of the engines' models

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = tuple(engines)
        super().__init__({"": RemoteModel(engines)})
        self._known: dict[str, RemoteModel] = {}  # one that is deleted may have requests left
        self._leading = asyncio.Lock()

    def status_of(self, key: str) -> ListedModel:
        """Return the status of the model that stands there in `served`, as the first engine that
        knows it has it.
        """
        listed = next((engine.listed[key] for engine in self.engines if key in engine.listed), None)
        return listed or super().status_of(key)

    def statuses(self) -> list[EngineStatus]:
        """Return those of all engines."""
        return [engine.status for engine in self.engines]

    def start(self, on_change: Callable[[], None]) -> None:
        """Connect to the engines; see `Models.start`."""
        self.on_change = on_change
        for engine in self.engines:
            engine.start(self._changed)

    async def close(self) -> None:
        """Disconnect from all engines."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def available(self, name: str | None) -> None:
        """Return when an engine has the model; see `Models.available`; raises `UnknownModel` once
        it is deleted.
        """
        while True:
            change = frames.Change("wake", self.key(name), caller=load_caller.get())
            wake = (engine.ask(change) for engine in self.engines)
            errors = [
                each
                for each in await asyncio.gather(*wake, return_exceptions=True)
                if each is not None
            ]
            if self.find(name).current.engine.ready:  # it may have been deleted meanwhile
                return
            if errors:
                raise errors[0]
            # It was unloaded again for others.

    async def put(self, name: str, what: What) -> bool:
        """Let all engines load a model, or none; see `Models.put`. A caller who leaves does not end
        it.
        """
        key = self.key(name, is_new=True)
        is_new = key not in self.served
        await asyncio.shield(
            self._tasks.begin(
                self._lead(self.served.get(key) or RemoteModel(self.engines, key), what)
            )
        )
        return is_new

    async def unload(self, name: str) -> None:
        """Let all engines give a model's memory back; see `Models.unload`."""
        self._require_changeable(name)
        await ask_all(self.engines, frames.Change("unload", name))

    async def delete(self, name: str) -> None:
        """Let all engines remove a model; see `Models.delete`."""
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
        """Look at the engines, one of which has other models, or another status."""
        listed = {name: status for engine in self.engines for name, status in engine.listed.items()}
        names = {name for engine in self.engines for name in engine.models} | listed.keys() or {""}
        self.results = self.engines[0].tally  # every engine has the same
        self.refused = {key for engine in self.engines for key in engine.refused}
        self.default_name = next(
            (name for name, status in listed.items() if status.default), self.default_name
        )
        for name in names - self.served.keys():
            self.served[name] = self._known.setdefault(name, RemoteModel(self.engines, name))
        for model in self.served.values():
            model.refresh()
        for name in self.served.keys() - (
            listed.keys() | {self.default_name} if listed else self.served.keys()
        ):
            self.served.pop(name)._info = None  # another one may get its name
        self.on_change()


class RemoteImageStore:
    """Keeps pictures with an engine's process, for all workers together; see `MemoryImageStore`."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def put(self, picture: ModelInput, image_id: str | None = None) -> str | None:
        """Keep a picture, and return its id, or None if nothing is kept, or the engine is gone."""
        stored: str | None = await self._ask(frames.Put(picture, image_id))
        return stored

    async def get(self, image_id: str) -> ModelInput | None:
        """Return the picture, or None if it is unknown, expired or pushed out, or the engine is
        gone.
        """
        picture: ModelInput | None = await self._ask(frames.Get(image_id))
        return picture

    def usage(self) -> StoreUsage:
        """Return the pictures that are kept, as the engine last published it."""
        return self._engine.kept

    async def close(self) -> None:
        """Do nothing: memory goes with the engine's process."""

    async def _ask(self, request: frames.Request) -> Any:
        try:
            return await self._engine.ask(request)
        except EngineUnavailable:
            return None
