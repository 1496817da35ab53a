"""Lets web workers of other processes use an engine of this one; `service.cluster.channel` has the picture."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
from collections.abc import Callable

from service.cluster.channel import EngineChannel, FramesProtocol, image_shape
from service.cluster.protocol import Cancel, Cancelled, Failure, Frame, FrameError, Hello, Model, Result, Status, Submit
from service.cluster.shared_memory import Pixels
from service.engine.base import Engine
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult
from service.errors import EngineUnavailable, InferenceFailed, ServiceError

logger = logging.getLogger(__name__)

_REFRESH_SECONDS = 1.0


class EngineServer:
    """Lets workers of other processes use an engine of this one.

    Args:
        engine: whose requests these become.
        link: where the workers are.
        workers: how many there are at most.
    """

    def __init__(self, engine: Engine, link: EngineChannel, *, workers: int) -> None:
        self._engine = engine
        self._link = link
        self._workers = workers
        self._connections: set[_WorkerConnection] = set()
        self._told: EngineStatus | None = None

    async def start(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Start the engine and take connections; `on_change` as of `Engine.start`."""

        def changed() -> None:
            info = self._engine.info
            if info is not None:
                self._link.pixels.grow(self._workers * Pixels.size(self._link.slots, image_shape(info)))
            self._tell()
            on_change()

        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _WorkerConnection(self._engine, self._connections, self._authorise), sock=self._link.listener
        )
        self._engine.start(changed)
        self._ticker = asyncio.create_task(self._refresh())

    async def close(self) -> None:
        """Close the engine; what it had on board is answered before the connections end."""
        self._ticker.cancel()
        await self._engine.close()
        self._tell()
        for connection in list(self._connections):
            await connection.finish()
        self._server.close()

    def _authorise(self, hello: Hello) -> Callable[[], Pixels] | None:
        """Where a worker's images lie, once their size is known; None for a stranger."""
        if not hmac.compare_digest(hello.key, self._link.key) or hello.worker >= self._workers:
            return None

        def pixels() -> Pixels:
            assert self._engine.info is not None, "images are sent to a loaded model"
            return Pixels(self._link.pixels, hello.worker, self._link.slots, image_shape(self._engine.info))

        return pixels

    async def _refresh(self) -> None:
        """A model that is compiled beside its work changes without saying so."""
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            self._tell()

    def _tell(self) -> None:
        status = dataclasses.replace(self._engine.status, queue_depth=0)
        if status != self._told:
            self._told = status
            for connection in self._connections:
                connection.tell()


class _WorkerConnection(FramesProtocol):
    """One worker's requests in the engine's process."""

    def __init__(
        self,
        engine: Engine,
        connections: set[_WorkerConnection],
        authorise: Callable[[Hello], Callable[[], Pixels] | None],
    ) -> None:
        super().__init__()
        self._engine = engine
        self._connections = connections
        self._authorise = authorise
        self._pixels_of: Callable[[], Pixels] | None = None
        self._pixels: Pixels | None = None
        self._tasks: dict[int, asyncio.Task[InferenceResult]] = {}

    def connection_lost(self, exc: Exception | None) -> None:
        """The worker is gone: nobody waits for what it asked."""
        super().connection_lost(exc)
        self._connections.discard(self)
        for task in self._tasks.values():
            task.cancel()

    def received(self, frame: Frame) -> None:
        """Requests of a worker that has said who it is."""
        if isinstance(frame, Hello) and self._pixels_of is None:
            self._pixels_of = self._authorise(frame)
            if self._pixels_of is None:
                raise FrameError("a stranger")
            self._connections.add(self)
            self.tell()
        elif isinstance(frame, Submit) and self._pixels_of is not None:
            task = self._tasks[frame.id] = self._loop.create_task(self._infer(frame))
            task.add_done_callback(lambda done: self._answer(frame.id, done))
        elif isinstance(frame, Cancel) and self._pixels_of is not None:
            if frame.id in self._tasks:  # else its answer is on the way already
                self._tasks[frame.id].cancel()
        else:
            raise FrameError(f"{type(frame).__name__} out of order")

    def tell(self) -> None:
        """Say how the engine is doing; the model first, so that whoever hears `ready` has it."""
        if self._engine.info is not None and self._pixels is None and self._pixels_of is not None:
            self._pixels = self._pixels_of()
            self.send(Model(self._engine.info))
        self.send(Status(self._engine.status))

    async def finish(self) -> None:
        """Send what is left to say, and close."""
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        self.close()

    async def _infer(self, frame: Submit) -> InferenceResult:
        if self._pixels is None:
            raise EngineUnavailable(self._engine.status.reason)
        request = InferenceRequest(self._pixels[frame.slot], frame.top_k, frame.map)
        return await self._engine.infer(request, timeout=frame.timeout)

    def _answer(self, id_: int, task: asyncio.Task[InferenceResult]) -> None:
        """One request's outcome: every Submit gets exactly one, also if it was cancelled before it began."""
        del self._tasks[id_]
        if task.cancelled():
            self.send(Failure(id_, Cancelled("cancelled")))
            return
        error = task.exception()
        if error is None:
            self.send(Result(id_, task.result()))
        elif isinstance(error, ServiceError):
            self.send(Failure(id_, error))
        else:
            logger.error("a request failed", exc_info=error)
            self.send(Failure(id_, InferenceFailed("the engine failed on this image")))
