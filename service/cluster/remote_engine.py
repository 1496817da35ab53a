"""Lets a web worker use an engine of another process; `service.cluster.channel` draws how."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from service.cluster import protocol
from service.cluster.channel import EngineChannel, FrameProtocol
from service.cluster.shared_memory import ImageSlots
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.errors import EngineUnavailable, QueueFull, ServiceError

logger = logging.getLogger(__name__)

_CONNECTION_LOST = "the engine ended and is being started again"


class RemoteEngine:
    """Sends images to an engine in a process of its own; see `service.engine.base.Engine`.

    Belongs to one event loop.

    Args:
        channel: where the engine is.
        worker: which worker this is.
        retry_seconds: how long to wait after a connection that failed.
    """

    def __init__(self, channel: EngineChannel, worker: int, *, retry_seconds: float = 0.1) -> None:
        self.info: ModelInfo | None = None
        self._channel = channel
        self._worker = worker
        self._retry_seconds = retry_seconds
        self._connection: _EngineConnection | None = None
        self._state: Literal["loading", "ready", "failed", "closed"] = "loading"
        self._reason = "the model is loading"
        self._last_status: EngineStatus | None = None
        self._on_change: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def status(self) -> EngineStatus:
        """Return how the engine is doing right now."""
        last, index, counters = self._last_status, self._channel.index, self._channel.counters
        return EngineStatus(
            device=last.device if last else self._channel.device,
            state=self._state,
            reason=self._reason,
            compiled=last.compiled if last else "",
            batch_sizes=last.batch_sizes if last else None,
            queue_depth=int(counters.queue_depth[index]) if self._state == "ready" else 0,
            restarts=int(counters.restarts[index]),
        )

    @property
    def ready(self) -> bool:
        """Return whether the engine takes images."""
        return self._state == "ready"

    @property
    def outstanding(self) -> int:
        """Return how many images of all workers together have no outcome yet."""
        return int(self._channel.counters.outstanding[:, self._channel.index].sum())

    def start(self, on_change: Callable[[], None]) -> None:
        """Connect, and connect again whenever the connection ends."""
        self._on_change = on_change
        self._task = asyncio.create_task(self._stay_connected())

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """See `Engine.infer`."""
        if self._state != "ready" or self._connection is None:
            raise EngineUnavailable(self._reason)
        return await self._connection.infer(request, timeout)

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
        if self._state != "failed":
            self._change("closed", "the engine is closed")

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
            if self._state != "closed":  # else it has said so
                self._change("failed", _CONNECTION_LOST)

    def _on_status(self, frame: protocol.StatusChanged | protocol.ModelLoaded) -> None:
        if isinstance(frame, protocol.ModelLoaded):
            self.info = frame.info
        elif not self._closed:
            self._last_status = frame.status
            self._change(frame.status.state, frame.status.reason)

    def _change(self, state: Literal["loading", "ready", "failed", "closed"], reason: str) -> None:
        changed = state != self._state
        self._state, self._reason = state, reason
        if changed:
            self._on_change()


@dataclass(slots=True, eq=False)
class _Pending:
    """A request without an outcome: its slot is in use though its caller may have gone."""

    slot: int
    future: asyncio.Future[InferenceResult]


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
        self._next_id = 0

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
        elif isinstance(frame, protocol.Failed):
            self._deliver(frame.id, frame.error())
        elif isinstance(frame, protocol.ModelLoaded):
            self._slots = self._channel.image_slots(self._worker, frame.info)
            # The last one given back is the first one taken, so that few pages are ever touched.
            self._free = list(range(self._slots.count - 1, -1, -1))
            self._on_status(frame)
        elif isinstance(frame, protocol.StatusChanged):
            self._on_status(frame)
        else:
            raise protocol.FrameError(f"{type(frame).__name__} out of order")

    async def infer(self, request: InferenceRequest, timeout: float) -> InferenceResult:
        """See `Engine.infer`."""
        if self._slots is None or self._transport is None:
            raise EngineUnavailable(_CONNECTION_LOST)
        if not self._free:  # all in use, or cancelled a moment ago and not given back yet
            raise QueueFull(f"all {self._slots.count} places in the queue are taken")
        slot = self._free.pop()
        self._slots[slot][...] = request.pixels
        self._next_id += 1
        id_ = self._next_id
        future: asyncio.Future[InferenceResult] = self._loop.create_future()
        self._pending[id_] = _Pending(slot, future)
        self._count()
        self.send(protocol.Submit(id_, slot, request.top_k, request.map, timeout))
        try:
            return await future
        except asyncio.CancelledError:
            self.send(protocol.Cancel(id_))  # the slot comes back with the answer to this
            raise

    def _deliver(self, id_: int, outcome: InferenceResult | ServiceError) -> None:
        request = self._pending.pop(id_, None)
        if request is None:
            raise protocol.FrameError(f"an answer to {id_}, which waits for none")
        self._free.append(request.slot)
        self._count()
        if request.future.done():  # its caller went away
            return
        if isinstance(outcome, ServiceError):
            request.future.set_exception(outcome)
        else:
            request.future.set_result(outcome)

    def _count(self) -> None:
        self._channel.counters.outstanding[self._worker, self._channel.index] = len(self._pending)
