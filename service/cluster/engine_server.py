"""Lets web workers of other processes use an engine of this one; `service.cluster.channel` draws how."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
from collections.abc import Callable

from service.cluster.channel import EngineChannel, FrameProtocol, image_shape
from service.cluster.protocol import (
    REQUEST_LIMIT,
    Cancel,
    Cancelled,
    Completed,
    Failed,
    Frame,
    FrameError,
    Hello,
    ModelLoaded,
    StatusChanged,
    Submit,
)
from service.cluster.shared_memory import ImageSlots
from service.engine.base import Engine
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult
from service.errors import EngineUnavailable, InferenceFailed, ServiceError

logger = logging.getLogger(__name__)


class EngineServer:
    """Serves an engine of this process to the workers of other processes.

    Args:
        engine: what computes their requests.
        channel: where the workers connect.
        workers: how many there are at most.
        refresh_seconds: how often the status is looked at for changes that the engine does not report itself.
    """

    def __init__(self, engine: Engine, channel: EngineChannel, *, workers: int, refresh_seconds: float = 1.0) -> None:
        self._engine = engine
        self._channel = channel
        self._workers = workers
        self._refresh_seconds = refresh_seconds
        self._connections: set[_WorkerConnection] = set()
        self._last_status: EngineStatus | None = None

    async def start(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Start the engine and accept connections; `on_change` as of `Engine.start`."""

        def engine_changed() -> None:
            info = self._engine.info
            if info is not None:
                self._channel.pixels.grow(self._workers * ImageSlots.size(self._channel.slots, image_shape(info)))
            self._publish_status()
            on_change()

        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _WorkerConnection(self._engine, self._connections, self._authorise), sock=self._channel.listener
        )
        self._engine.start(engine_changed)
        self._refresher = asyncio.create_task(self._refresh())

    async def close(self) -> None:
        """Close the engine; the requests that it has are answered before the connections end."""
        self._refresher.cancel()
        await self._engine.close()
        self._publish_status()
        for connection in list(self._connections):
            await connection.finish()
        self._server.close()

    def _authorise(self, hello: Hello) -> Callable[[], ImageSlots] | None:
        """Return what maps a worker's images, once their size is known; None for a stranger."""
        if not hmac.compare_digest(hello.key, self._channel.key) or hello.worker >= self._workers:
            return None

        def slots() -> ImageSlots:
            assert self._engine.info is not None, "images are sent to a loaded model"
            shape = image_shape(self._engine.info)
            return ImageSlots(self._channel.pixels, hello.worker, self._channel.slots, shape)

        return slots

    async def _refresh(self) -> None:
        """Publish changes without an event of their own: a model that is compiled beside its work."""
        while True:
            await asyncio.sleep(self._refresh_seconds)
            self._publish_status()

    def _publish_status(self) -> None:
        status = dataclasses.replace(self._engine.status, queue_depth=0)
        if status != self._last_status:
            self._last_status = status
            for connection in self._connections:
                connection.publish_status()


class _WorkerConnection(FrameProtocol):
    """One worker's requests in the engine's process."""

    def __init__(
        self,
        engine: Engine,
        connections: set[_WorkerConnection],
        authorise: Callable[[Hello], Callable[[], ImageSlots] | None],
    ) -> None:
        super().__init__(REQUEST_LIMIT)
        self._engine = engine
        self._connections = connections
        self._authorise = authorise
        self._map_slots: Callable[[], ImageSlots] | None = None
        self._slots: ImageSlots | None = None
        self._tasks: dict[int, asyncio.Task[InferenceResult]] = {}

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what the worker asked: nobody waits for it."""
        super().connection_lost(exc)
        self._connections.discard(self)
        for task in self._tasks.values():
            task.cancel()

    def frame_received(self, frame: Frame) -> None:
        """Handle a request; the first frame must say which worker it is from."""
        if isinstance(frame, Hello) and self._map_slots is None:
            self._map_slots = self._authorise(frame)
            if self._map_slots is None:
                raise FrameError("a stranger")
            self._connections.add(self)
            self.publish_status()
        elif isinstance(frame, Submit) and self._map_slots is not None:
            task = self._tasks[frame.id] = self._loop.create_task(self._infer(frame))
            task.add_done_callback(lambda done: self._answer(frame.id, done))
        elif isinstance(frame, Cancel) and self._map_slots is not None:
            if frame.id in self._tasks:  # else its answer is on the way already
                self._tasks[frame.id].cancel()
        else:
            raise FrameError(f"{type(frame).__name__} out of order")

    def publish_status(self) -> None:
        """Send the engine's status; the model first, so that whoever hears `ready` has it."""
        if self._engine.info is not None and self._slots is None and self._map_slots is not None:
            self._slots = self._map_slots()
            self.send(ModelLoaded(self._engine.info))
        self.send(StatusChanged(self._engine.status))

    async def finish(self) -> None:
        """Send the answers that are still owed, and close."""
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        self.close()

    async def _infer(self, frame: Submit) -> InferenceResult:
        if self._slots is None:
            raise EngineUnavailable(self._engine.status.reason)
        request = InferenceRequest(self._slots[frame.slot], frame.top_k, frame.map)
        return await self._engine.infer(request, timeout=frame.timeout)

    def _answer(self, id_: int, task: asyncio.Task[InferenceResult]) -> None:
        """Send one request's outcome: every Submit gets exactly one, also if it was cancelled before it began."""
        del self._tasks[id_]
        if task.cancelled():
            self.send(Failed.of(id_, Cancelled("cancelled")))
            return
        error = task.exception()
        if error is None:
            self.send(Completed.of(id_, task.result()))
        elif isinstance(error, ServiceError):
            self.send(Failed.of(id_, error))
        else:
            logger.error("a request failed", exc_info=error)
            self.send(Failed.of(id_, InferenceFailed("the engine failed on this image")))
