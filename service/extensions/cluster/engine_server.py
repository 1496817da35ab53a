"""Serves the models of an engine process to web workers.

    web worker                                     engine process
    ----------                                     --------------
    RemoteEngine.infer                             EngineServer
      Submit          --- Unix socket, frames -->    LocalEngine.infer -> batch queue
      future  <-- Answer or Failed, ---------------  answers of a batch leave together,
                  one wake-up per batch              so a worker wakes up once

The requests of all workers meet in one queue, and share batches. A worker that dies loses only its
own requests. If an engine dies, its requests fail with `EngineUnavailable`. The worker then
connects to its successor at the same address: a socket in a folder that only this user may enter.

A worker holds each generation that it knows until it releases it. `LocalModel` therefore closes an
old generation when no worker has a request of it left.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from service.background import Tasks, keep_running
from service.engine.backbones import ModelEngine
from service.errors import CheckpointRefused, EngineUnavailable, InferenceFailed, ServiceError
from service.extensions.cluster import frames
from service.models.generation import Generation
from service.models.local_models import LocalModels
from service.web.image_stores import MemoryImageStore

logger = logging.getLogger("vitserve")

_FINISH_SECONDS: Final = 1.0

# Interval at which to check whether all workers have adopted a generation.
_CHECK_SECONDS: Final = 0.01


class EngineServer:
    """Serves the models of this process to workers of other processes.

    Args:
        restarts: number of restarts of the process.
        on_change: called when the state of a model changes, or another generation takes over.
        refresh_seconds: interval of heartbeats, and of checks for status changes without an event,
            such as the queue's depth.
    """

    def __init__(
        self,
        models: LocalModels,
        images: MemoryImageStore,
        *,
        restarts: int = 0,
        on_change: Callable[[], None] = lambda: None,
        refresh_seconds: float = 1.0,
    ) -> None:
        self.models = models
        self.images = images
        self.workers: set[_Worker] = set()
        self.loader: _Worker | None = None
        self._serving = Tasks()
        self._restarts = restarts
        self._on_change = on_change
        self._refresh_seconds = refresh_seconds
        self._last_status: frames.StatusChanged | None = None

    async def start(self, path: Path) -> None:
        """Start loading the models, and accept connections on a socket with this path."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            partial(frames.Connection, self._accept), str(path)
        )
        self.models.start(self._changed)
        self._refresher = keep_running("engine-status", self._refresh)

    async def close(self) -> None:
        """Close the models, answer their last requests, and close the connections."""
        self._refresher.cancel()
        self._server.close()
        await self.models.close()
        self.publish_status()
        for worker in list(self.workers):
            await worker.finish()

    @property
    def status(self) -> frames.StatusChanged:
        """Return the status to publish."""
        models = self.models
        depth = sum(status.queue_depth for status in models.statuses())
        status = replace(
            models.default.current.engine.status, restarts=self._restarts, queue_depth=depth
        )
        listed = {key: models.status_of(key) for key in models.served}
        refused = frozenset(models.refused)
        return frames.StatusChanged(
            status, self.images.usage(), listed, dict(models.results), refused
        )

    async def adopted(self, name: str) -> None:
        """Wait until all workers use the current generation of a model, or it is deleted."""
        number = self.models.versions[name].number
        while name in self.models.served and any(
            worker.adopted.get(name, 0) < number for worker in self.workers
        ):
            await asyncio.sleep(_CHECK_SECONDS)

    def _accept(self, connection: frames.Connection) -> None:
        self._serving.begin(self._serve(connection))

    async def _serve(self, connection: frames.Connection) -> None:
        worker = _Worker(self, connection)
        self.workers.add(worker)
        try:
            worker.announce()
            worker.send(self.status)
            async for frame in connection:
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
            for worker in self.workers:
                worker.send(frames.Alive())
            self.publish_status()

    def publish_status(self) -> None:
        """Send the status to all workers if it has changed."""
        status = self.status
        if status != self._last_status:
            self._last_status = status
            for worker in self.workers:
                worker.send(status)


class _Worker:
    """One worker's requests in the engine's process, and the generations that it holds.

    Attributes:
        adopted: generation of its new requests, by model.
    """

    def __init__(self, server: EngineServer, connection: frames.Connection) -> None:
        self.adopted: dict[str, int] = {}
        self.send = connection.send
        self._server = server
        self._connection = connection
        self._generations: dict[tuple[str, int], tuple[Generation[ModelEngine], ExitStack]] = {}
        self._withdrawn: set[tuple[str, int]] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def announce(self) -> None:
        """Announce each ready generation once and hold it for the worker; announce deletions."""
        served = {
            (name, model.current.number): model.current
            for name, model in self._server.models.served.items()
        }
        for key, generation in served.items():
            held, _ = self._generations.get(key, (None, None))
            info = generation.engine.info
            if info is not None and generation.engine.ready and held is not generation:
                self._hold(key, generation, busy=False)
                self.send(frames.Serving(*key, info))
        for key, (generation, _) in self._generations.items():
            # If a newer generation follows, its announcement tells the worker.
            if key in served:
                is_withdrawn = served[key] is not generation
            else:
                is_withdrawn = key[0] not in self._server.models.served
            if is_withdrawn and key not in self._withdrawn:
                self._withdrawn.add(key)
                self.send(frames.Withdrawn(*key))

    def _hold(
        self, key: tuple[str, int], generation: Generation[ModelEngine], *, busy: bool
    ) -> None:
        """Hold a generation for the worker, and release an unloaded one with the same number.

        Args:
            busy: whether the worker has requests of the generation, so that it is not evicted.
        """
        held = ExitStack()
        held.enter_context(generation.request(held=not busy))
        if key in self._generations:
            self._release([key])
        self._generations[key] = generation, held

    def _release(self, keys: Iterable[tuple[str, int]]) -> None:
        for key in keys:
            self._withdrawn.discard(key)
            self._generations.pop(key)[1].close()

    def handle(self, frame: frames.Frame) -> None:
        """Handle a request."""
        match frame:
            case frames.Uses(model, newest, oldest, busy):
                self.adopted[model] = newest
                if (model, newest) in self._generations:
                    self._hold((model, newest), self._generations[model, newest][0], busy=busy)
                self._release_older(model, oldest)
            case frames.Cancel(id_) if id_ in self._tasks:
                self._tasks[id_].cancel()
            case frames.Cancel():
                pass  # the answer was sent already
            case frames.Call(id_, request):
                task = asyncio.create_task(self._answer(id_, request))
                self._tasks[id_] = task
                task.add_done_callback(partial(self._forget, id_))
            case _:
                raise frames.FrameError(f"{type(frame).__name__} out of order")

    def _forget(self, id_: int, _: asyncio.Task[None]) -> None:
        self._tasks.pop(id_, None)

    def _release_older(self, model: str, oldest: int) -> None:
        """Release generations before `oldest`, except the current one, if it was just reloaded."""
        served = self._server.models.served.get(model)
        current = None if served is None else served.current
        self._release(
            [
                (name, number)
                for (name, number), (held, _) in self._generations.items()
                if name == model and number < oldest and held is not current
            ]
        )

    async def finish(self) -> None:
        """Send the pending answers, and close."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_FINISH_SECONDS)
        self._connection.close()

    async def close(self) -> None:
        """Cancel the worker's requests, because the worker has disconnected."""
        self._connection.close()
        for task in self._tasks.values():
            task.cancel()
        await self._discard("the web worker that led the swap ended")
        self._release(list(self._generations))

    @contextmanager
    def _engine(self, model: str, generation: int) -> Iterator[ModelEngine]:
        """Yield the engine of a generation, and hold it until the context ends."""
        held, _ = self._generations.get((model, generation), (None, None))
        if held is None:
            raise EngineUnavailable("the engine has a different model now")
        with held.request():
            yield held.engine

    async def _answer(self, id_: int, request: frames.Request) -> None:
        try:
            self.send(frames.Reply(id_, await self._result(request)))
        except Exception as error:  # a defect fails only its own request
            if not isinstance(error, ServiceError) or type(error) not in frames.ERRORS:
                logger.exception("a request failed")
                error = InferenceFailed("the engine failed on this request")
            self._server.publish_status()  # which has the count of failed loads
            self.send(frames.Failed.of(id_, error))

    async def _result(self, request: frames.Request) -> object:
        result: object = None
        match request:
            case frames.Submit() as submit:
                with self._engine(submit.model, submit.generation) as engine:
                    result = await engine.infer(submit.image, timeout=submit.timeout)
            case frames.EmbedTexts(model, generation, texts, timeout):
                with self._engine(model, generation) as engine:
                    result = await engine.embed_texts(texts, timeout=timeout)
            case frames.Put(picture, image_id):
                result = await self._server.images.put(picture, image_id)
            case frames.Get(image_id):
                result = await self._server.images.get(image_id)
            case frames.Change():
                await self._change(request)
        return result

    async def _change(self, change: frames.Change) -> None:
        """Apply a worker's change to the models."""
        models = self._server.models
        model = change.model
        match change.act:
            case "load":
                await models.prepare(model, change.what)
                self._server.loader = self
            case "take_over":
                await self._take_over(model)
            case "discard":
                await self._discard(str(change.what))
            case "wake":
                await models.load(model or None, change.caller)
            case "unload":
                await models.unload(model)
            case "delete":
                if model in models.served and await models.answer_waiting(model):
                    await asyncio.sleep(_CHECK_SECONDS)  # until workers hold it for their requests
                await models.delete(model)
            case "reload":
                models.reload()

    # A swap, led by one worker.

    async def _take_over(self, model: str) -> None:
        if self._server.loader is not self:
            raise CheckpointRefused("the engine restarted during the swap")
        self._server.loader = None
        self._server.models.take_over()
        await self._server.adopted(model)
        await self._server.models.fit(model)

    async def _discard(self, reason: str) -> None:
        if self._server.loader is self:
            self._server.loader = None
            await self._server.models.discard(reason)
