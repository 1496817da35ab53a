"""What a web worker has in place of a model in its own process: connections to the engine processes, one a device.

The engines load, replace and close generations (`service.models.model`); a worker learns from frames which generation
serves. New requests belong to the newest one that any engine serves; the worker releases the old one when its own last
request of it has ended. A swap is led by the worker that is asked for it: all engines load, then all take over; when
one fails, none does.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from model.images.preprocess import ModelInput
from service.cluster import frames
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.errors import EngineUnavailable, ServiceError, SwapUnderWay
from service.models.model import UNDER_WAY, Generation, Loads, ServedModel
from service.web.image_stores import StoreUsage

logger = logging.getLogger(__name__)

CONNECTION_LOST: Final = "the engine ended and is being started again"

_RETRY_SECONDS: Final = 0.1


class EngineClient:
    """A connection to one engine process, and to its successor when it ends. Belongs to one event loop.

    Args:
        path: of the engine's socket.
        device: of the status until the engine says more.
    Attributes:
        models: the model of each generation that the engine has, by its number.
        loads, kept: as the engine counts them.
    """

    def __init__(self, path: Path, device: str) -> None:
        self.models: dict[int, ModelInfo] = {}
        self.status = EngineStatus(device, "loading", "the model is loading", "", None, 0)
        self.loads = Loads()
        self.kept = StoreUsage()
        self._path = path
        self._on_change: Callable[[], None] = lambda: None
        self._writer: asyncio.StreamWriter | None = None
        self._uses = (0, 0)
        self._pending: dict[int, tuple[frames.Request, asyncio.Future[Any]]] = {}
        self._ids = itertools.count(1)
        self._task: asyncio.Task[None] | None = None

    @property
    def info(self) -> ModelInfo | None:
        """Return the description of the newest model; None before it is loaded."""
        return self.models[max(self.models)] if self.models else None

    @property
    def outstanding(self) -> int:
        """Return the number of this worker's requests that have no outcome yet."""
        return len(self._pending)

    def start(self, on_change: Callable[[], None]) -> None:
        """Connect, and connect again whenever the connection ends; `on_change` is called when the status changes."""
        self._on_change = on_change
        self._task = asyncio.create_task(self._stay_connected())

    def send(self, frame: frames.Frame) -> None:
        """Send a frame; raises `EngineUnavailable` without a connection."""
        if self._writer is None:
            raise EngineUnavailable(self.status.reason or CONNECTION_LOST)
        self._writer.write(frames.encode(frame))

    async def ask(self, request: frames.Request) -> Any:
        """Make a request, and return its result; raises the error that is its answer.

        Raises:
            EngineUnavailable: the engine is gone.
        """
        id_ = next(self._ids)
        self.send(frames.Call(id_, request))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[id_] = request, future
        try:
            return await future
        except asyncio.CancelledError:
            if self._writer is not None:
                self.send(frames.Cancel(id_))
            raise
        finally:
            self._pending.pop(id_, None)

    def use(self, newest: int, oldest: int) -> None:
        """Tell the engine once which generations this worker uses, if it has the newest one, and forget older ones."""
        if newest in self.models and self._uses != (newest, oldest):
            self._uses = newest, oldest
            self.models = {number: info for number, info in self.models.items() if number >= oldest}
            self.send(frames.Uses(newest, oldest))

    async def close(self) -> None:
        """Disconnect; requests without an outcome are answered `EngineUnavailable`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _stay_connected(self) -> None:
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._path, limit=frames.BUFFER_BYTES)
            except OSError:  # it is being started
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            try:
                async for frame in frames.frames(reader):
                    self._receive(frame)
            except frames.FrameError as error:
                logger.error("connection to an engine: %s", error)
            finally:
                self._disconnected()
            await asyncio.sleep(_RETRY_SECONDS)

    def _disconnected(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._writer = None
        self.models.clear()
        self._uses = (0, 0)
        for _, future in self._pending.values():
            if not future.done():
                future.set_exception(EngineUnavailable(CONNECTION_LOST))
        if self.status.state != "closed":  # else it has said so
            self.status = replace(self.status, state="failed", reason=CONNECTION_LOST, queue_depth=0)
        self._on_change()

    def _receive(self, frame: frames.Frame) -> None:
        match frame:
            case frames.StatusChanged(status, loads, kept):
                changed = status.state != self.status.state
                self.status, self.loads, self.kept = status, loads, kept
                if changed:
                    self._on_change()
            case frames.Serving(generation, info):
                self.models[generation] = info
                if self.status.state == "ready":  # else the status follows
                    self._on_change()
            case frames.Answer() | frames.Failed():
                request, future = self._pending.get(frame.id, (None, None))
                if request is None or future is None or future.done():
                    return  # its caller went away
                if isinstance(frame, frames.Failed):
                    future.set_exception(frame.error())
                else:
                    future.set_result(frames.result_of(frame, request))
            case _:
                raise frames.FrameError(f"{type(frame).__name__} out of order")


class RemoteEngine:
    """One generation of a model on the engines of other processes; see `service.engine.base.Engine`.

    Each image goes to the engine, of those that have the generation, with the fewest of this worker's requests.
    """

    def __init__(self, engines: Sequence[EngineClient], generation: int) -> None:
        self.engines = engines
        self.info: ModelInfo | None = None
        self._generation = generation
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
        self._serving = [
            engine for engine in self.engines if self._generation in engine.models and engine.status.state == "ready"
        ]
        infos = [engine.models[self._generation] for engine in self._serving]
        if infos:
            self.info = replace(infos[0], device=",".join(info.device for info in infos))

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """See `Engine.infer`."""
        submit = frames.Submit(self._generation, request.pixels, request.requested, timeout)
        result: InferenceResult = await self._least_loaded().ask(submit)
        return result

    async def embed_texts(self, texts: Sequence[str], *, timeout: float) -> NDArray[np.float32]:
        """See `Engine.embed_texts`; all workers ask the same engine, so that a text is computed once."""
        engine = self._serving[0] if self._serving else self._least_loaded()
        features: NDArray[np.float32] = await engine.ask(frames.EmbedTexts(self._generation, tuple(texts), timeout))
        return features

    def _least_loaded(self) -> EngineClient:
        """Return the engine with the fewest requests; of equals, the next in turn."""
        if not self._serving:
            raise EngineUnavailable(self.status.reason or "no engine has this model any more")
        first = next(self._turns) % len(self._serving)
        in_turn = self._serving[first:] + self._serving[:first]
        return min(in_turn, key=lambda engine: engine.outstanding)


class RemoteModel(ServedModel):
    """A model whose engines run in processes of their own; see the module's text."""

    current: Generation[RemoteEngine]

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        super().__init__()
        self.engines = tuple(engines)
        self.current = Generation(RemoteEngine(self.engines, 0), 0)
        self._open = [self.current]
        self._on_change: Callable[[], None] = lambda: None
        self._leads = False

    @property
    def loads(self) -> Loads:
        """Return the counts of loads; every engine has the same."""
        return self.engines[0].loads

    def start(self, on_change: Callable[[], None]) -> None:
        """Connect to the engines; see `ServedModel.start`."""
        self._on_change = on_change
        for engine in self.engines:
            engine.start(self._changed)

    async def replace(self, checkpoint: str | None) -> None:
        """Let all engines load a checkpoint, and then take over; see `ServedModel.replace`."""
        if self._leads:
            raise SwapUnderWay(UNDER_WAY)
        self._leads = True
        try:
            await self._ask_all(frames.Load(checkpoint))
        except ServiceError as error:
            discard = frames.Discard(str(error))
            await asyncio.gather(*(engine.ask(discard) for engine in self.engines), return_exceptions=True)
            raise
        else:
            await self._ask_all(frames.TakeOver())
        finally:
            self._leads = False

    async def close(self) -> None:
        """Disconnect from all engines."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def _ask_all(self, request: frames.Request) -> None:
        """Ask all engines; raises the first error, and cancels what the others do."""
        try:
            async with asyncio.TaskGroup() as group:
                for engine in self.engines:
                    group.create_task(engine.ask(request))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _changed(self) -> None:
        """Adopt the newest generation that an engine serves."""
        ready = [engine for engine in self.engines if engine.status.state == "ready"]
        newest = max((number for engine in ready for number in engine.models), default=self.current.number)
        if newest != self.current.number:
            previous, self.current = self.current, Generation(RemoteEngine(self.engines, newest), newest)
            self._open.append(self.current)
            self._task(self._release(previous))
        self.current.engine.refresh()
        self._use()
        self._on_change()

    def _use(self) -> None:
        for engine in self.engines:
            engine.use(self.current.number, self._open[0].number)

    async def _release(self, previous: Generation[RemoteEngine]) -> None:
        await previous.idle()
        self._open.remove(previous)
        self._use()


class RemoteImageStore:
    """Keeps pictures with an engine's process, for all workers together; see `MemoryImageStore`."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def put(self, picture: ModelInput) -> str | None:
        """Keep a picture, and return its id, or None if nothing is kept, or the engine is gone."""
        image_id: str | None = await self._ask(frames.Put(picture))
        return image_id

    async def get(self, image_id: str) -> ModelInput | None:
        """Return the picture, or None if it is unknown, expired or pushed out, or the engine is gone."""
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
