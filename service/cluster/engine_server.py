"""Lets web workers of other processes use the engine of this process; see `service.cluster.channel`."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import os
from collections.abc import Callable
from functools import partial

from service.cluster import protocol
from service.cluster.channel import EngineChannel, FrameProtocol, peer_user
from service.cluster.shared_memory import ImageSlots
from service.engine.local import LocalEngine
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult
from service.engine.streams import Waiting
from service.engine.texts import Floats
from service.errors import EngineUnavailable, InferenceFailed, ServiceError

logger = logging.getLogger(__name__)


class EngineServer:
    """Serves an engine of this process to at most `workers` workers of other processes.

    Every `refresh_seconds` the status is looked at for changes that the engine does not report itself.

    Attributes:
        connections: those that have said which worker they are from.
    """

    def __init__(
        self, engine: LocalEngine, channel: EngineChannel, *, workers: int, refresh_seconds: float = 1.0
    ) -> None:
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
        self._entries: dict[int, Waiting] = {}
        self._texts: dict[int, asyncio.Task[Floats]] = {}

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
        for entry in self._entries.values():
            self._server.engine.cancel(entry)
        self._entries.clear()
        for task in self._texts.values():
            task.cancel()

    def frame_received(self, frame: protocol.Frame) -> None:
        """Handle a request; the first frame must say which worker it is from."""
        if isinstance(frame, protocol.Hello) and self._worker is None:
            authentic = hmac.compare_digest(frame.key, self._server.channel.key)
            if not authentic or frame.worker >= self._server.workers:
                raise protocol.FrameError("no worker of this service")
            self._worker = frame.worker
            self._reader.limit = protocol.TEXTS_LIMIT
            self._server.connections.add(self)
            self.publish_status()
        elif isinstance(frame, protocol.Submit) and self._worker is not None:
            self._submit(frame)
        elif isinstance(frame, protocol.Cancel) and self._worker is not None:
            if frame.id in self._entries:  # else its answer is on the way already
                self._server.engine.cancel(self._entries[frame.id])
                self._answer(frame.id, protocol.Cancelled("cancelled"))
            elif frame.id in self._texts:
                self._texts[frame.id].cancel()
        elif isinstance(frame, protocol.EmbedTexts) and self._worker is not None:
            task = asyncio.create_task(self._server.engine.embed_texts(frame.texts, timeout=frame.timeout))
            self._texts[frame.id] = task
            task.add_done_callback(partial(self._embedded, frame.id))
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
        while self._entries or self._texts:  # their outcomes are callbacks of this event loop
            await asyncio.sleep(0)
        self.close()

    def _submit(self, frame: protocol.Submit) -> None:
        """Hand an image to the engine without a task of its own, which would take twice the time."""
        try:
            if self._slots is None:
                raise EngineUnavailable(self._server.engine.status.reason)
            request = InferenceRequest(self._slots[frame.slot], frame.requested)
            entry = self._server.engine.submit(request, frame.timeout, partial(self._answer, frame.id))
        except Exception as error:  # noqa: BLE001  a defect costs its own image alone
            self._answer(frame.id, error)
        else:
            self._entries[frame.id] = entry

    def _embedded(self, id_: int, task: asyncio.Task[Floats]) -> None:
        """Answer texts with their features, or with an error."""
        del self._texts[id_]
        error = protocol.Cancelled("cancelled") if task.cancelled() else task.exception()
        if error is None:
            self.send(protocol.TextsEmbedded(id_, task.result()))
        else:
            self._answer(id_, error)

    def _answer(self, id_: int, outcome: InferenceResult | BaseException) -> None:
        """Send one request's outcome: every Submit gets exactly one, even if it was not taken."""
        self._entries.pop(id_, None)
        if isinstance(outcome, InferenceResult):
            try:
                self.send(protocol.Completed(id_, outcome))
                return
            except Exception as error:  # noqa: BLE001  see `_submit`
                outcome = error
        if isinstance(outcome, ServiceError) and type(outcome) in protocol.FAILURES:
            self.send(protocol.Failed.of(id_, outcome))
        else:
            logger.error("a request failed", exc_info=outcome)
            self.send(protocol.Failed.of(id_, InferenceFailed("the engine failed on this image")))
