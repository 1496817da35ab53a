"""Lets web workers of other processes use the engine of this process; see `service.cluster.channel`."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import os
from collections.abc import Callable

from model.prediction import EncodedPicture, Picture
from service.cluster import protocol
from service.cluster.channel import EngineChannel, FrameProtocol, peer_user
from service.cluster.shared_memory import ImageSlots
from service.engine.base import Engine
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult
from service.errors import EngineUnavailable, InferenceFailed, ServiceError

logger = logging.getLogger(__name__)


class EngineServer:
    """Serves an engine of this process to at most `workers` workers of other processes.

    Every `refresh_seconds` the status is looked at for changes that the engine does not report itself.

    Attributes:
        connections: those that have said which worker they are from.
    """

    def __init__(self, engine: Engine, channel: EngineChannel, *, workers: int, refresh_seconds: float = 1.0) -> None:
        self.engine = engine
        self.channel = channel
        self.workers = workers
        self.connections: set[_WorkerConnection] = set()
        self._refresh_seconds = refresh_seconds
        self._last_status: EngineStatus | None = None

    async def start(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Start the engine and accept connections; `on_change` as of `Engine.start`."""

        def engine_changed() -> None:
            if self.engine.info is not None:
                self.channel.grow_pixels(self.workers, self.engine.info)
                self.channel.device_name.write(self.engine.info.device)
            self._publish_status()
            on_change()

        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _WorkerConnection(self), sock=self.channel.listener
        )
        self.engine.start(engine_changed)
        self._refresher = asyncio.create_task(self._refresh())

    async def close(self) -> None:
        """Close the engine; the requests that it has are answered before the connections end."""
        self._refresher.cancel()
        await self.engine.close()
        self._publish_status()
        for connection in list(self.connections):
            await connection.finish()
        self._server.close()

    async def _refresh(self) -> None:
        """Publish changes without an event of their own: a model that is compiled beside its work."""
        while True:
            await asyncio.sleep(self._refresh_seconds)
            self._publish_status()

    def _publish_status(self) -> None:
        status = dataclasses.replace(self.engine.status, queue_depth=0)
        if status != self._last_status:
            self._last_status = status
            for connection in self.connections:
                connection.publish_status()


class _WorkerConnection(FrameProtocol):
    """One worker's requests in the engine's process."""

    def __init__(self, server: EngineServer) -> None:
        super().__init__(protocol.REQUEST_LIMIT)
        self._server = server
        self._worker: int | None = None
        self._slots: ImageSlots | None = None
        self._tasks: dict[int, asyncio.Task[InferenceResult]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close the connection of another user before anything is read from it: the address has no permissions."""
        super().connection_made(transport)
        if peer_user(transport.get_extra_info("socket")) != os.geteuid():
            logger.debug("engine connection: another user's")  # who may come as often as they like
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the worker's requests: nobody waits for them."""
        super().connection_lost(exc)
        self._server.connections.discard(self)
        for task in self._tasks.values():
            task.cancel()

    def frame_received(self, frame: protocol.Frame) -> None:
        """Handle a request; the first frame must say which worker it is from."""
        if isinstance(frame, protocol.Hello) and self._worker is None:
            authentic = hmac.compare_digest(frame.key, self._server.channel.key)
            if not authentic or frame.worker >= self._server.workers:
                raise protocol.FrameError("no worker of this service")
            self._worker = frame.worker
            self._server.connections.add(self)
            self.publish_status()
        elif isinstance(frame, protocol.Submit) and self._worker is not None:
            task = self._tasks[frame.id] = self._loop.create_task(self._infer(frame))
            task.add_done_callback(lambda done: self._answer(frame.id, done))
        elif isinstance(frame, protocol.Cancel) and self._worker is not None:
            if frame.id in self._tasks:  # else its answer is on the way already
                self._tasks[frame.id].cancel()
        else:
            raise protocol.FrameError(f"{type(frame).__name__} out of order")

    def publish_status(self) -> None:
        """Send the engine's status; the model first, so that a worker that reads `ready` has the model."""
        info = self._server.engine.info
        if info is not None and self._slots is None and self._worker is not None:
            self._slots = self._server.channel.image_slots(self._worker, info)
            self.send(protocol.ModelLoaded(info))
        self.send(protocol.StatusChanged(self._server.engine.status))

    async def finish(self) -> None:
        """Send the answers that are still owed, and close."""
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        self.close()

    async def _infer(self, frame: protocol.Submit) -> InferenceResult:
        if self._slots is None:
            raise EngineUnavailable(self._server.engine.status.reason)
        picture: Picture = self._slots[frame.slot]
        if frame.encoded is not None:
            length, *size, orientation = frame.encoded
            picture = EncodedPicture(self._slots.read(frame.slot, length), (size[0], size[1]), orientation)
        request = InferenceRequest(picture, frame.requested, frame.traceparent)
        result = await self._server.engine.infer(request, timeout=frame.timeout)
        if result.outputs.decoded is None:
            return result
        self._slots[frame.slot][...] = result.outputs.decoded
        return dataclasses.replace(result, outputs=dataclasses.replace(result.outputs, decoded=None))

    def _answer(self, id_: int, task: asyncio.Task[InferenceResult]) -> None:
        """Send one request's outcome: every Submit gets exactly one, even if cancelled before it began."""
        del self._tasks[id_]
        error = protocol.Cancelled("cancelled") if task.cancelled() else task.exception()
        if error is None:
            self.send(protocol.Completed(id_, task.result()))
        elif isinstance(error, ServiceError) and type(error) in protocol.FAILURES:
            self.send(protocol.Failed.of(id_, error))
        else:
            logger.error("a request failed", exc_info=error)
            self.send(protocol.Failed.of(id_, InferenceFailed("the engine failed on this image")))
