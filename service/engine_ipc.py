"""The engine protocol between processes: `RemoteEngine` in a web worker, `EngineServer` around an engine.

    web worker                                     engine process
    ----------                                     --------------
    RemoteEngine.infer                             EngineServer
      slot <- pixels                                 Submit -> Engine.infer(pixels in the slot)
      Submit          --- Unix socket, frames -->      (LocalEngine: the same queue for all workers)
      future  <-- Result or Failure, --------------- answers of a batch leave in one write,
                  one wake-up a batch                so a worker wakes up once

The workers' requests meet in one queue, and batches mix them. A worker that dies takes its own requests
along and no others; an engine that dies is an `EngineUnavailable` for every request that it had. The
worker then waits at the same address for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from service.engine import Engine
from service.errors import EngineUnavailable, InferenceFailed, QueueFull, ServiceError
from service.frames import (
    Cancel,
    Cancelled,
    Decoder,
    Failure,
    Frame,
    FrameError,
    Hello,
    Model,
    Result,
    Status,
    Submit,
    encode,
)
from service.messages import EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.shared_memory import Board, Pixels, SharedFile

logger = logging.getLogger(__name__)

_REFRESH_SECONDS = 1.0
_RETRY_SECONDS = 0.1

_GONE = "the engine ended and is being started again"


class EngineLink:
    """Where one engine process and the workers meet; made before they are forked.

    Attributes:
        listener: a Unix socket without a name in the file system. It outlives the engine process, so
            workers that connect while there is none wait for the next.
        key: what tells this service's workers from anyone else who finds the address.
        pixels: memory for images, sized by the engine when it knows their size.
    """

    def __init__(self, index: int, device: str, board: Board, *, slots: int) -> None:
        self.index = index
        self.device = device
        self.board = board
        self.slots = slots
        self.key = secrets.token_bytes(32)
        self.pixels = SharedFile("pixels")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind("")  # the kernel finds a free abstract address
        self.listener.listen(128)

    def connect(self) -> socket.socket:
        """A connection, accepted or waiting to be.

        Raises:
            OSError: nobody listens any more.
        """
        connection = socket.socket(self.listener.family, self.listener.type)
        try:
            connection.connect(self._address)
        except OSError:
            connection.close()
            raise
        connection.setblocking(False)
        return connection

    @property
    def _address(self) -> bytes:
        return cast(bytes, self.listener.getsockname())

    def close(self) -> None:
        """Let go of socket and memory."""
        self.listener.close()
        self.pixels.close()


def image_shape(info: ModelInfo) -> tuple[int, int, int]:
    """(rows, columns, channels) of the images that a model takes."""
    return (*info.preprocess.size, len(info.preprocess.mean))


class _FramesProtocol(asyncio.Protocol):
    """A connection as frames; what is sent within one turn of the event loop leaves in one write."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._decoder = Decoder()
        self._outgoing: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self.received(frame)
        except FrameError as error:
            logger.error("engine connection: %s", error)
            self.close()

    def received(self, frame: Frame) -> None:
        raise NotImplementedError

    def send(self, frame: Frame) -> None:
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(encode(frame))

    def close(self) -> None:
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        if self._transport is not None and self._outgoing:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()


# The engine's side.


class EngineServer:
    """Lets workers of other processes use an engine of this one.

    Args:
        engine: whose requests these become.
        link: where the workers are.
        workers: how many there are at most.
    """

    def __init__(self, engine: Engine, link: EngineLink, *, workers: int) -> None:
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


class _WorkerConnection(_FramesProtocol):
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


# The web worker's side.


class RemoteEngine:
    """An engine in a process of its own; see `service.engine.Engine`.

    Belongs to one event loop.

    Args:
        link: where the engine is.
        worker: which worker this is.
    """

    def __init__(self, link: EngineLink, worker: int) -> None:
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


class _EngineConnection(_FramesProtocol):
    """This worker's requests in one engine process, from its start to its end."""

    def __init__(self, link: EngineLink, worker: int, heard: Callable[[Status | Model], None]) -> None:
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


# Several devices.


class EngineGroup:
    """Several engines as one: an image goes to the engine with the shortest queue, over all workers.

    It is ready as long as one of them is.

    Args:
        engines: one a device, all with the same model.
    """

    def __init__(self, engines: Sequence[RemoteEngine]) -> None:
        self.engines = tuple(engines)
        self._last = 0

    @property
    def info(self) -> ModelInfo | None:
        """Of the model, on all the devices that have it."""
        infos = [engine.info for engine in self.engines if engine.info is not None]
        if not infos:
            return None
        return dataclasses.replace(infos[0], device=",".join(info.device for info in infos))

    @property
    def status(self) -> EngineStatus:
        """Of the best of them; the queues together."""
        all_of_them = [engine.status for engine in self.engines]
        best = next((status for status in all_of_them if status.state == "ready"), all_of_them[0])
        return dataclasses.replace(
            best,
            device=",".join(status.device for status in all_of_them),
            queue_depth=sum(status.queue_depth for status in all_of_them),
            restarts=sum(status.restarts for status in all_of_them),
        )

    @property
    def ready(self) -> bool:
        """Whether one of them takes images."""
        return any(engine.ready for engine in self.engines)

    def start(self, on_change: Callable[[], None]) -> None:
        """Start all."""
        for engine in self.engines:
            engine.start(on_change)

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """See `Engine.infer`."""
        return await self._shortest().infer(request, timeout=timeout)

    async def close(self) -> None:
        """Close all."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def _shortest(self) -> RemoteEngine:
        """The ready engine with the fewest images; of equals, the next in turn."""
        count = len(self.engines)
        in_turn = [(self._last + 1 + step) % count for step in range(count)]
        ready = [index for index in in_turn if self.engines[index].ready]
        if not ready:
            raise EngineUnavailable(self.status.reason)
        self._last = min(ready, key=lambda index: self.engines[index].load)
        return self.engines[self._last]
