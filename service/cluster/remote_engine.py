"""An engine of another process, as web workers see it; `service.cluster.channel` has the picture."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from service.cluster.channel import EngineChannel, FramesProtocol, image_shape
from service.cluster.protocol import Cancel, Failure, Frame, FrameError, Hello, Model, Result, Status, Submit
from service.cluster.shared_memory import Pixels
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.errors import EngineUnavailable, QueueFull

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1

_GONE = "the engine ended and is being started again"


class RemoteEngine:
    """An engine in a process of its own; see `service.engine.local.Engine`.

    Belongs to one event loop.

    Args:
        link: where the engine is.
        worker: which worker this is.
    """

    def __init__(self, link: EngineChannel, worker: int) -> None:
        self.info: ModelInfo | None = None
        self._link = link
        self._worker = worker
        self._connection: _EngineConnection | None = None
        self._state: Literal["loading", "ready", "failed", "closed"] = "loading"
        self._reason = "the model is loading"
        self._told: EngineStatus | None = None
        self._on_change: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def status(self) -> EngineStatus:
        """How it is doing right now."""
        told, index = self._told, self._link.index
        return EngineStatus(
            device=told.device if told else self._link.device,
            state=self._state,
            reason=self._reason,
            compiled=told.compiled if told else "",
            batch_sizes=told.batch_sizes if told else None,
            queue_depth=int(self._link.board.queue_depth[index]) if self._state == "ready" else 0,
            restarts=int(self._link.board.restarts[index]),
        )

    @property
    def ready(self) -> bool:
        """Whether it takes images."""
        return self._state == "ready"

    @property
    def load(self) -> int:
        """Images that all workers together have in it."""
        return int(self._link.board.images_out[:, self._link.index].sum())

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
        """Leave; what is still waited for is answered `EngineUnavailable`."""
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
                    lambda: _EngineConnection(self._link, self._worker, self._heard), sock=self._link.connect()
                )
            except OSError as error:
                logger.error("engine %s: %s", self._link.device, error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            await self._connection.lost.wait()
            if self._state != "closed":  # else it has said so
                self._change("failed", _GONE)

    def _heard(self, frame: Status | Model) -> None:
        if isinstance(frame, Model):
            self.info = frame.info
        elif not self._closed:
            self._told = frame.status
            self._change(frame.status.state, frame.status.reason)

    def _change(self, state: Literal["loading", "ready", "failed", "closed"], reason: str) -> None:
        changed = state != self._state
        self._state, self._reason = state, reason
        if changed:
            self._on_change()


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that has no outcome yet: its slot is in use though its caller may have gone."""

    slot: int
    future: asyncio.Future[InferenceResult]


class _EngineConnection(FramesProtocol):
    """This worker's requests in one engine process, from its start to its end."""

    def __init__(self, link: EngineChannel, worker: int, heard: Callable[[Status | Model], None]) -> None:
        super().__init__()
        self.lost = asyncio.Event()
        self._link = link
        self._worker = worker
        self._heard = heard
        self._pixels: Pixels | None = None
        self._free: list[int] = []
        self._waiting: dict[int, _Waiting] = {}
        self._next_id = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say who is calling."""
        super().connection_made(transport)
        self.send(Hello(self._worker, self._link.key))

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine is gone, and with it every answer that it owed."""
        super().connection_lost(exc)
        waiting, self._waiting = self._waiting, {}
        self._count()
        for entry in waiting.values():
            if not entry.future.done():
                entry.future.set_exception(EngineUnavailable(_GONE))
        self.lost.set()

    def received(self, frame: Frame) -> None:
        """Answers, and news of the engine."""
        if isinstance(frame, Result | Failure):
            self._deliver(frame)
        elif isinstance(frame, Model):
            self._pixels = Pixels(self._link.pixels, self._worker, self._link.slots, image_shape(frame.info))
            # The last one given back is the first one taken, so that few pages are ever touched.
            self._free = list(range(self._pixels.slots - 1, -1, -1))
            self._heard(frame)
        elif isinstance(frame, Status):
            self._heard(frame)
        else:
            raise FrameError(f"{type(frame).__name__} out of order")

    async def infer(self, request: InferenceRequest, timeout: float) -> InferenceResult:
        """See `Engine.infer`."""
        if self._pixels is None or self._transport is None:
            raise EngineUnavailable(_GONE)
        if not self._free:  # all in use, or cancelled a moment ago and not given back yet
            raise QueueFull(f"all {self._pixels.slots} places in the queue are taken")
        slot = self._free.pop()
        self._pixels[slot][...] = request.pixels
        self._next_id += 1
        id_ = self._next_id
        future: asyncio.Future[InferenceResult] = self._loop.create_future()
        self._waiting[id_] = _Waiting(slot, future)
        self._count()
        self.send(Submit(id_, slot, request.top_k, request.map, timeout))
        try:
            return await future
        except asyncio.CancelledError:
            self.send(Cancel(id_))  # the slot comes back with the answer to this
            raise

    def _deliver(self, frame: Result | Failure) -> None:
        entry = self._waiting.pop(frame.id, None)
        if entry is None:
            raise FrameError(f"an answer to {frame.id}, which waits for none")
        self._free.append(entry.slot)
        self._count()
        if entry.future.done():  # its caller went away
            return
        if isinstance(frame, Result):
            entry.future.set_result(frame.result)
        else:
            entry.future.set_exception(frame.error)

    def _count(self) -> None:
        self._link.board.images_out[self._worker, self._link.index] = len(self._waiting)
