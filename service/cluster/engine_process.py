"""Runs an engine process: loads the model, serves the web workers, ends on `STOP` or when it fails.

    web worker                                     engine process
    ----------                                     --------------
    RemoteEngine.infer                             EngineServer
      Submit          --- Unix socket, frames -->    LocalEngine.infer -> batch queue
      future  <-- Answer or Failed, ---------------  answers of a batch leave together,
                  one wake-up a batch                so a worker wakes up once

The workers' requests meet in one queue, and batches mix them. A worker that dies takes its own requests along and no
others; an engine that dies is an `EngineUnavailable` for every request that it had. The worker then connects to its
successor, at the same address: a socket in a folder that only this user may enter.

A worker holds each generation that it was told of until it has released it, so `LocalModel` closes the old one when
no worker has a request of it left. Only here, and in a service of one process, torch is imported.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from model.errors import NewProcessNeeded
from service.cluster import frames
from service.cluster.processes import SERVING, Report
from service.cluster.supervisor import TRY_AGAIN, Child
from service.engine.local import Loader, LocalEngine, engine_of
from service.engine.messages import InferenceRequest
from service.errors import CheckpointRefused, EngineUnavailable, InferenceFailed, ServiceError
from service.lifecycle import freeze_objects, trim_regularly
from service.models.model import LocalModel
from service.observe.metrics import Metrics
from service.settings import Settings
from service.web.image_stores.memory import MemoryImageStore

logger = logging.getLogger("vitserve")

STOP: Final = signal.SIGUSR1
"""Ends an engine process in order. An engine outlives its workers, and SIGTERM, SIGINT and SIGHUP may go to all at
once."""

_FINISH_SECONDS: Final = 1.0

_LOOK_SECONDS: Final = 0.01
"""Seconds between two looks whether all workers have adopted what has taken over."""


@dataclass
class Served:
    """What the service serves: the newest generation, and its checkpoint; None is the configured checkpoint."""

    generation: int = 1
    checkpoint: str | None = None


class EngineServer:
    """Serves the model of this process to workers of other processes.

    Args:
        restarts: how often the process was started again.
        on_change: called when the model's state has changed, or another generation has taken over.
        refresh_seconds: between two looks at changes of the status that no one reports, such as the queue's depth.
    """

    def __init__(
        self,
        model: LocalModel,
        images: MemoryImageStore,
        *,
        restarts: int = 0,
        on_change: Callable[[], None] = lambda: None,
        refresh_seconds: float = 1.0,
    ) -> None:
        self.model = model
        self.images = images
        self.workers: set[_Worker] = set()
        self.loader: _Worker | None = None
        self._restarts = restarts
        self._on_change = on_change
        self._refresh_seconds = refresh_seconds
        self._last_status: frames.StatusChanged | None = None

    async def start(self, path: Path) -> None:
        """Load the model, and accept connections at a socket of this path."""
        self._server = await asyncio.start_unix_server(self._serve, path, limit=frames.BUFFER_BYTES)
        self.model.start(self._changed)
        self._refresher = asyncio.create_task(self._refresh())

    async def close(self) -> None:
        """Close the model; the requests that it has are answered before the connections end."""
        self._refresher.cancel()
        self._server.close()
        await self.model.close()
        self.publish_status()
        for worker in list(self.workers):
            await worker.finish()

    @property
    def status(self) -> frames.StatusChanged:
        """Return the status as it is published."""
        status = replace(self.model.current.engine.status, restarts=self._restarts)
        return frames.StatusChanged(status, self.model.loads, self.images.usage())

    async def adopted(self) -> None:
        """Return when all workers give new requests to the current generation."""
        number = self.model.current.number
        while any(worker.adopted < number for worker in self.workers):
            await asyncio.sleep(_LOOK_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker = _Worker(self, writer)
        self.workers.add(worker)
        try:
            worker.announce()
            worker.send(self.status)
            async for frame in frames.frames(reader):
                worker.handle(frame)
        except frames.FrameError as error:
            logger.error("connection of a worker: %s", error)
        finally:
            self.workers.discard(worker)
            await worker.close()

    def _changed(self) -> None:
        for worker in self.workers:
            worker.announce()
        self.publish_status()
        self._on_change()

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_seconds)
            self.publish_status()

    def publish_status(self) -> None:
        """Send all workers the status if it has changed."""
        status = self.status
        if status != self._last_status:
            self._last_status = status
            for worker in self.workers:
                worker.send(status)


class _Worker:
    """One worker's requests in the engine's process, and the generations that it holds.

    Attributes:
        adopted: the newest generation that its new requests belong to.
    """

    def __init__(self, server: EngineServer, writer: asyncio.StreamWriter) -> None:
        self.adopted = 0
        self._server = server
        self._writer = writer
        self._generations: dict[int, tuple[LocalEngine, ExitStack]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def send(self, frame: frames.Frame) -> None:
        """Send a frame; it is lost if the worker is gone."""
        if not self._writer.is_closing():
            self._writer.write(frames.encode(frame))

    def announce(self) -> None:
        """Tell the worker of the current generation once it is ready, and hold it for the worker."""
        generation = self._server.model.current
        info = generation.engine.info
        if info is not None and generation.engine.ready and generation.number not in self._generations:
            held = ExitStack()
            held.enter_context(generation.request())
            self._generations[generation.number] = generation.engine, held
            self.send(frames.Serving(generation.number, info))

    def handle(self, frame: frames.Frame) -> None:
        """Handle a request."""
        match frame:
            case frames.Uses(newest, oldest):
                self.adopted = newest
                for number in [number for number in self._generations if number < oldest]:
                    self._generations.pop(number)[1].close()
            case frames.Cancel(id_) if id_ in self._tasks:
                self._tasks[id_].cancel()
            case frames.Cancel():
                pass  # its answer is on the way
            case frames.Call(id_, request):
                task = asyncio.create_task(self._answer(id_, request))
                self._tasks[id_] = task
                task.add_done_callback(lambda _: self._tasks.pop(id_, None))
            case _:
                raise frames.FrameError(f"{type(frame).__name__} out of order")

    async def finish(self) -> None:
        """Send the answers that are still owed, and close."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_FINISH_SECONDS)
        self._writer.close()

    async def close(self) -> None:
        """Cancel the worker's requests: nobody waits for them."""
        self._writer.close()
        for task in self._tasks.values():
            task.cancel()
        await self._discard("the web worker that asked for it ended")
        for _, held in self._generations.values():
            held.close()

    def _engine(self, generation: int) -> LocalEngine:
        if generation not in self._generations:
            raise EngineUnavailable("the engine has another model now")
        return self._generations[generation][0]

    async def _answer(self, id_: int, request: frames.Request) -> None:
        try:
            reply: frames.Frame = frames.answer(id_, await self._result(request))
        except Exception as error:  # a defect costs its own request alone
            if not isinstance(error, ServiceError) or type(error) not in frames.ERRORS:
                logger.exception("a request failed")
                error = InferenceFailed("the engine failed on this request")
            self._server.publish_status()  # it has the count of a load that failed
            reply = frames.Failed.of(id_, error)
        self.send(reply)

    async def _result(self, request: frames.Request) -> object:
        result: object = None
        match request:
            case frames.Submit(generation, pixels, requested, timeout):
                result = await self._engine(generation).infer(InferenceRequest(pixels, requested), timeout=timeout)
            case frames.EmbedTexts(generation, texts, timeout):
                result = await self._engine(generation).embed_texts(texts, timeout=timeout)
            case frames.Put(picture):
                result = await self._server.images.put(picture)
            case frames.Get(image_id):
                result = await self._server.images.get(image_id)
            case frames.Load(checkpoint):
                await self._load(checkpoint)
            case frames.TakeOver():
                await self._take_over()
            case frames.Discard(reason):
                await self._discard(reason)
        return result

    # The next checkpoint, on behalf of the worker that asked for it.

    async def _load(self, checkpoint: str | None) -> None:
        model = self._server.model
        try:
            await model.prepare(checkpoint)
        except asyncio.CancelledError:
            await model.discard("another engine did not load it, or who asked for it is gone")
            raise
        self._server.loader = self

    async def _take_over(self) -> None:
        if self._server.loader is not self:
            raise CheckpointRefused("the engine was started again before it was to take over")
        self._server.loader = None
        self._server.model.take_over()
        await self._server.adopted()

    async def _discard(self, reason: str) -> None:
        if self._server.loader is self:
            self._server.loader = None
            await self._server.model.discard(reason)


def run_engine(settings: Settings, child: Child, path: Path, load: Loader, metrics: Metrics, served: Served) -> int:
    """Run one device's engine, and return the exit code.

    It is 0 after `STOP`, 1 when the engine failed, and `TRY_AGAIN` when the next one starts with another option.

    Args:
        settings: see `service.settings`; the device is this engine's.
        child: this process, as the supervisor knows it.
        path: of the socket that workers connect to.
        load: called on the engine's thread.
        served: what the service serves, and this engine is to serve as well.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    trim_regularly()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # a round trip is much shorter with it
        return runner.run(_run(settings, child, path, load, metrics, served))


async def _run(settings: Settings, child: Child, path: Path, load: Loader, metrics: Metrics, served: Served) -> int:
    over = asyncio.Event()

    def changed() -> None:
        current = model.current
        if current.engine.ready:
            child.link.send(Report(SERVING, current.number, current.checkpoint))
        elif current.engine.status.state == "failed":
            over.set()

    asyncio.get_running_loop().add_signal_handler(STOP, over.set)
    make = partial(engine_of, settings, load, metrics.observe_batch)
    model = LocalModel(make, served.checkpoint, served.generation, on_retired=freeze_objects)
    images = MemoryImageStore(ttl=settings.recent_ttl, max_bytes=settings.recent_bytes)
    server = EngineServer(model, images, restarts=child.restarts, on_change=changed)
    beating = asyncio.create_task(child.link.beat())
    await server.start(path)
    await over.wait()
    engine = model.current.engine
    failed, failure = engine.status.state == "failed", engine.failure
    await server.close()
    beating.cancel()
    if isinstance(failure, NewProcessNeeded) and child.options.get(failure.option) != failure.value:
        logger.warning("%s: starting again with %s=%s", child.name, failure.option, failure.value)
        child.link.send(Report(options={failure.option: failure.value}))
        return TRY_AGAIN
    return int(failed)
