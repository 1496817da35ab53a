"""Lets a web worker use an engine of another process, or several of them; `service.cluster.channel` draws how."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from service.cluster import protocol
from service.cluster.channel import EngineChannel, FrameProtocol
from service.cluster.shared_memory import ImageSlots
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.errors import EngineUnavailable, QueueFull, ServiceError

logger = logging.getLogger(__name__)

_CONNECTION_LOST = "the engine ended and is being started again"


class RemoteEngine:
    """Sends images to an engine in a process of its own; see `service.engine.base.Engine`.

    Belongs to one event loop, and waits `retry_seconds` after a connection that failed.
    """

    def __init__(self, channel: EngineChannel, worker: int, *, retry_seconds: float = 0.1) -> None:
        self.info: ModelInfo | None = None
        self._channel = channel
        self._worker = worker
        self._retry_seconds = retry_seconds
        self._connection: _EngineConnection | None = None
        self._status = EngineStatus(channel.device, "loading", "the model is loading", "", None, 0)
        self._on_change: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def engines(self) -> tuple[Self]:
        """Return this engine: it is no group."""
        return (self,)

    @property
    def status(self) -> EngineStatus:
        """Return the engine's current status."""
        index, counters = self._channel.index, self._channel.counters
        depth = int(counters.queue_depth[index]) if self.ready else 0
        # Whatever becomes of an engine, its metrics keep their labels.
        device = self._channel.device_name.read() or self._channel.device
        return replace(self._status, device=device, queue_depth=depth, restarts=int(counters.restarts[index]))

    @property
    def ready(self) -> bool:
        """Return whether the engine takes images."""
        return self._status.state == "ready"

    @property
    def outstanding(self) -> int:
        """Return the number of images, of all workers together, that have no outcome yet."""
        return int(self._channel.counters.outstanding[:, self._channel.index].sum())

    def start(self, on_change: Callable[[], None]) -> None:
        """Connect, and connect again whenever the connection ends."""
        self._on_change = on_change
        self._task = asyncio.create_task(self._stay_connected())

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """See `Engine.infer`."""
        if not self.ready or self._connection is None:
            raise EngineUnavailable(self._status.reason)
        return await self._connection.infer(request, timeout)

    async def embed_texts(self, texts: Sequence[str], *, timeout: float) -> NDArray[np.float32]:
        """See `Engine.embed_texts`."""
        if not self.ready or self._connection is None:
            raise EngineUnavailable(self._status.reason)
        return await self._connection.embed_texts(texts, timeout)

    async def close(self) -> None:
        """Disconnect; requests without an outcome are answered `EngineUnavailable`."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._connection is not None:
            self._connection.close()
            await self._connection.lost.wait()
        if self._status.state != "failed":
            self._change(replace(self._status, state="closed", reason="the engine is closed"))

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, self._connection = await loop.create_unix_connection(
                    lambda: _EngineConnection(self._channel, self._worker, self._on_status),
                    sock=self._channel.connect(),
                )
            except OSError as error:
                if not isinstance(error, BlockingIOError):  # else many wait to be accepted, and it gets its turn
                    logger.error("engine %s: %s", self._channel.device, error)
                await asyncio.sleep(self._retry_seconds)
                continue
            await self._connection.lost.wait()
            if self._status.state != "closed":  # else it has said so
                self._change(replace(self._status, state="failed", reason=_CONNECTION_LOST))

    def _on_status(self, frame: protocol.StatusChanged | protocol.ModelLoaded) -> None:
        if isinstance(frame, protocol.ModelLoaded):
            self.info = frame.info
        elif not self._closed:
            self._change(frame.status)

    def _change(self, status: EngineStatus) -> None:
        changed = status.state != self._status.state
        self._status = status
        if changed:
            self._on_change()


class Balancer:
    """Sends each image to the engine, of several with the same model, that has the shortest queue over all workers."""

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        self.engines = tuple(engines)
        self._last = 0

    @property
    def info(self) -> ModelInfo | None:
        """Return the description of the model, with the devices of all loaded engines, or None."""
        infos = [engine.info for engine in self.engines if engine.info is not None]
        if not infos:
            return None
        return replace(infos[0], device=",".join(info.device for info in infos))

    @property
    def status(self) -> EngineStatus:
        """Return the status of the first ready engine, with the queue depths and restarts of all."""
        statuses = [engine.status for engine in self.engines]
        first = next((status for status in statuses if status.state == "ready"), statuses[0])
        return replace(
            first,
            device=",".join(status.device for status in statuses),
            queue_depth=sum(status.queue_depth for status in statuses),
            restarts=sum(status.restarts for status in statuses),
        )

    @property
    def ready(self) -> bool:
        """Return whether at least one engine takes images."""
        return any(engine.ready for engine in self.engines)

    def start(self, on_change: Callable[[], None]) -> None:
        """Start all engines."""
        for engine in self.engines:
            engine.start(on_change)

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """See `Engine.infer`."""
        return await self._least_loaded().infer(request, timeout=timeout)

    async def embed_texts(self, texts: Sequence[str], *, timeout: float) -> NDArray[np.float32]:
        """See `Engine.embed_texts`; all workers ask the same engine, so that a text is computed once."""
        engine = next((engine for engine in self.engines if engine.ready), self.engines[0])
        return await engine.embed_texts(texts, timeout=timeout)

    async def close(self) -> None:
        """Close all engines."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def _least_loaded(self) -> RemoteEngine:
        """Return the ready engine with the fewest images; of equals, the next in turn."""
        count = len(self.engines)
        in_turn = [(self._last + 1 + step) % count for step in range(count)]
        ready = [index for index in in_turn if self.engines[index].ready]
        if not ready:
            raise EngineUnavailable(self.status.reason)
        self._last = min(ready, key=lambda index: self.engines[index].outstanding)
        return self.engines[self._last]


class _Pending(NamedTuple):
    """A request without an outcome: its slot is in use though its caller may have gone; texts have none."""

    slot: int | None
    future: asyncio.Future[Any]


class _EngineConnection(FrameProtocol):
    """This worker's requests in one engine process, from its start to its end."""

    def __init__(
        self,
        channel: EngineChannel,
        worker: int,
        on_status: Callable[[protocol.StatusChanged | protocol.ModelLoaded], None],
    ) -> None:
        super().__init__(protocol.REPLY_LIMIT)
        self.lost = asyncio.Event()
        self._channel = channel
        self._worker = worker
        self._on_status = on_status
        self._slots: ImageSlots | None = None
        self._free: list[int] = []
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count(1)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say which worker this is."""
        super().connection_made(transport)
        self.send(protocol.Hello(self._worker, self._channel.key))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the requests that the engine still had."""
        super().connection_lost(exc)
        pending, self._pending = self._pending, {}
        self._count()
        for request in pending.values():
            if not request.future.done():
                request.future.set_exception(EngineUnavailable(_CONNECTION_LOST))
        self.lost.set()

    def frame_received(self, frame: protocol.Frame) -> None:
        """Deliver answers, and hand on the engine's status."""
        if isinstance(frame, protocol.Completed):
            self._deliver(frame.id, frame.result)
        elif isinstance(frame, protocol.TextsEmbedded):
            self._deliver(frame.id, frame.features)
        elif isinstance(frame, protocol.Failed):
            self._deliver(frame.id, frame.error())
        elif isinstance(frame, protocol.ModelLoaded | protocol.StatusChanged):
            if isinstance(frame, protocol.ModelLoaded):
                self._slots = self._channel.image_slots(self._worker, frame.info)
                # The last one given back is the first one taken, so that few pages are ever touched.
                self._free = list(range(self._slots.count - 1, -1, -1))
            self._on_status(frame)
        else:
            raise protocol.FrameError(f"{type(frame).__name__} out of order")

    async def infer(self, request: InferenceRequest, timeout: float) -> InferenceResult:
        """See `Engine.infer`."""
        if self._slots is None or self._transport is None:
            raise EngineUnavailable(_CONNECTION_LOST)
        if not self._free:  # all in use, or cancelled a moment ago and not given back yet
            raise QueueFull(f"all {self._slots.count} places in the queue are taken")
        self._slots[self._free[-1]][...] = request.pixels  # taken only after the copy, which may be refused
        slot = self._free.pop()
        result: InferenceResult = await self._outcome(
            lambda id_: protocol.Submit(id_, slot, timeout, request.requested), slot
        )
        return result

    async def embed_texts(self, texts: Sequence[str], timeout: float) -> NDArray[np.float32]:
        """See `Engine.embed_texts`."""
        features: NDArray[np.float32] = await self._outcome(lambda id_: protocol.EmbedTexts(id_, tuple(texts), timeout))
        return features

    async def _outcome(self, frame: Callable[[int], protocol.Frame], slot: int | None = None) -> Any:
        """Send the frame of a new id, and return its outcome."""
        id_ = next(self._ids)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending[id_] = _Pending(slot, future)
        self._count()
        self.send(frame(id_))
        try:
            return await future
        except asyncio.CancelledError:
            self.send(protocol.Cancel(id_))  # the slot comes back with the answer to this
            raise

    def _deliver(self, id_: int, outcome: InferenceResult | NDArray[np.float32] | ServiceError) -> None:
        if id_ not in self._pending:
            raise protocol.FrameError(f"an answer to {id_}, which waits for none")
        slot, future = self._pending.pop(id_)
        if slot is not None:
            self._free.append(slot)
        self._count()
        if future.done():  # its caller went away
            return
        if isinstance(outcome, ServiceError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _count(self) -> None:
        self._channel.counters.outstanding[self._worker, self._channel.index] = len(self._pending)
