"""Runs an engine process: loads the model, serves the web workers, ends on `STOP` or when it fails.

    web worker                                     engine process
    ----------                                     --------------
    RemoteEngine.infer                             EngineServer
      Submit          --- Unix socket, frames -->    LocalEngine.infer -> batch queue
      future  <-- Answer or Failed, ---------------  answers of a batch leave together,
                  one wake-up a batch                so a worker wakes up once

The workers' requests meet in one queue, and batches mix them. A worker that dies takes its own
requests along and no others; an engine that dies is an `EngineUnavailable` for every request that
it had. The worker then connects to its successor, at the same address: a socket in a folder that
only this user may enter.

A worker holds each generation that it was told of until it has released it, so `LocalModel` closes
the old one when no worker has a request of it left. Only here, and in a service of one process,
torch is imported.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import uvloop

from model.errors import NewProcessNeeded
from service.background import Tasks, keep_running
from service.engine.backbones import Backbones, Loader, ModelEngine
from service.errors import CheckpointRefused, EngineUnavailable, InferenceFailed, ServiceError
from service.extensions.cluster import frames
from service.extensions.cluster.processes import SERVING, Report
from service.extensions.cluster.supervisor import TRY_AGAIN, Child
from service.lifecycle import release_memory, trim_regularly
from service.models.configured import configured_models
from service.models.generation import Generation, Version
from service.models.local_models import LocalModels
from service.models.residency import load_caller
from service.observe.metrics import Metrics
from service.settings import Settings
from service.web.image_stores import MemoryImageStore

logger = logging.getLogger("vitserve")

# Ends an engine process in order. An engine outlives its workers, and SIGTERM, SIGINT and SIGHUP
# may go to all at once.
STOP: Final = signal.SIGUSR1

_FINISH_SECONDS: Final = 1.0

# Seconds between two looks whether all workers have adopted what has taken over.
_LOOK_SECONDS: Final = 0.01


class EngineServer:
    """Serves the models of this process to workers of other processes.

    Args:
        restarts: how often the process was started again.
        on_change: called when the state of a model has changed, or another generation has taken
        over.
        refresh_seconds: between two signs of life, and looks at changes of the status that no one
            reports, such as the queue's depth.
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
        """Load the models, and accept connections at a socket of this path."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: frames.Connection(
                lambda connection: self._serving.begin(self._serve(connection))
            ),
            str(path),
        )
        self.models.start(self._changed)
        self._refresher = keep_running("engine-status", self._refresh)

    async def close(self) -> None:
        """Close the models; the requests that they have are answered before the connections end."""
        self._refresher.cancel()
        self._server.close()
        await self.models.close()
        self.publish_status()
        for worker in list(self.workers):
            await worker.finish()

    @property
    def status(self) -> frames.StatusChanged:
        """Return the status as it is published."""
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
        """Return when all workers give new requests to the current generation of a model, or it is
        deleted.
        """
        number = self.models.versions[name].number
        while name in self.models.served and any(
            worker.adopted.get(name, 0) < number for worker in self.workers
        ):
            await asyncio.sleep(_LOOK_SECONDS)

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
        """Send all workers the status if it has changed."""
        status = self.status
        if status != self._last_status:
            self._last_status = status
            for worker in self.workers:
                worker.send(status)


class _Worker:
    """One worker's requests in the engine's process, and the generations that it holds.

    Attributes:
        adopted: the newest generation of each model that its new requests belong to.
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
        """Tell the worker of each current generation once it is ready, and hold it for the worker;
        and of the gone.
        """
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
            # Of one that another generation follows the worker learns by that.
            is_gone = (
                served[key] is not generation
                if key in served
                else key[0] not in self._server.models.served
            )
            if is_gone and key not in self._withdrawn:
                self._withdrawn.add(key)
                self.send(frames.Withdrawn(*key))

    def _hold(
        self, key: tuple[str, int], generation: Generation[ModelEngine], *, busy: bool
    ) -> None:
        """Keep a generation for the worker, perhaps for its requests, in place of an unloaded one
        of its version.
        """
        held = ExitStack()
        held.enter_context(generation.request(held=not busy))
        self._release([key] if key in self._generations else [])
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
                served = self._server.models.served.get(model)
                current = (
                    served and served.current
                )  # the worker is just told of it, where it was loaded again
                old = [
                    key
                    for key, (held, _) in self._generations.items()
                    if held is not current and key[1] < oldest
                ]
                self._release([key for key in old if key[0] == model])
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
        self._connection.close()

    async def close(self) -> None:
        """Cancel the worker's requests: nobody waits for them."""
        self._connection.close()
        for task in self._tasks.values():
            task.cancel()
        await self._discard("the web worker that asked for it ended")
        self._release(list(self._generations))

    @contextmanager
    def _engine(self, model: str, generation: int) -> Iterator[ModelEngine]:
        """Give the engine of a generation, which is kept until the context ends."""
        held, _ = self._generations.get((model, generation), (None, None))
        if held is None:
            raise EngineUnavailable("the engine has another model now")
        with held.request():
            yield held.engine

    async def _answer(self, id_: int, request: frames.Request) -> None:
        try:
            self.send(frames.answer(id_, await self._result(request)))
        except Exception as error:  # a defect costs its own request alone
            if not isinstance(error, ServiceError) or type(error) not in frames.ERRORS:
                logger.exception("a request failed")
                error = InferenceFailed("the engine failed on this request")
            self._server.publish_status()  # it has the count of a load that failed
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
        """Do what a worker asks of the models."""
        models, model = self._server.models, change.model
        match change.act:
            case "load":
                await models.prepare(model, change.what)
                self._server.loader = self
            case "take_over":
                await self._take_over(model)
            case "discard":
                await self._discard(str(change.what))
            case "wake":
                load_caller.set(change.caller)  # of this call's own task
                await models.available(model or None)
            case "unload":
                await models.unload(model)
            case "delete":
                if model in models.served and await models.answer_waiting(model):
                    await asyncio.sleep(_LOOK_SECONDS)  # until workers hold it for their requests
                await models.delete(model)
            case "reload":
                models.reload()

    # The next version of a model, on behalf of the worker that asked for it.

    async def _take_over(self, model: str) -> None:
        if self._server.loader is not self:
            raise CheckpointRefused("the engine was started again before it was to take over")
        self._server.loader = None
        self._server.models.take_over()
        await self._server.adopted(model)
        await self._server.models.fit(model)

    async def _discard(self, reason: str) -> None:
        if self._server.loader is self:
            self._server.loader = None
            await self._server.models.discard(reason)


def run_engine(
    settings: Settings,
    child: Child,
    path: Path,
    load: Loader,
    metrics: Metrics,
    versions: Mapping[str, Version],
) -> int:
    """Run one device's engine, and return the exit code.

    It is 0 after `STOP`, 1 when the engine failed, and `TRY_AGAIN` when the next one starts with
    another option.

    Args:
        settings: see `service.settings`; the device is this engine's.
        child: this process, as the supervisor knows it.
        path: of the socket that workers connect to.
        load: called on the engine's thread.
        versions: of the models that the service serves instead of what is configured, and this
        engine is to serve.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    trim_regularly()
    with asyncio.Runner(
        loop_factory=uvloop.new_event_loop
    ) as runner:  # a round trip is much shorter with it
        return runner.run(_run(settings, child, path, load, metrics, versions))


async def _run(
    settings: Settings,
    child: Child,
    path: Path,
    load: Loader,
    metrics: Metrics,
    versions: Mapping[str, Version],
) -> int:
    over = asyncio.Event()

    def changed() -> None:
        if models.failure:
            over.set()
        elif models.default.current.engine.ready:
            child.link.send(Report(SERVING, dict(models.versions)))

    asyncio.get_running_loop().add_signal_handler(STOP, over.set)
    make = Backbones(settings, load, metrics.observe_batch).engine
    models = LocalModels(
        settings, make, configured_models(settings), versions, on_retired=release_memory
    )
    images = MemoryImageStore(
        ttl=settings.recent_ttl,
        max_bytes=settings.recent_bytes,
        on_evicted=metrics.recent_evicted_age.observe,
    )
    server = EngineServer(models, images, restarts=child.restarts, on_change=changed)
    beating = keep_running("heartbeat", child.link.beat)
    await server.start(path)
    await over.wait()
    failed, failure = (
        bool(models.failure),
        models.served[models.default_name].current.engine.backbone.failure,
    )
    await server.close()
    beating.cancel()
    if isinstance(failure, NewProcessNeeded) and child.options.get(failure.option) != failure.value:
        logger.warning("%s: starting again with %s=%s", child.name, failure.option, failure.value)
        child.link.send(Report(options={failure.option: failure.value}))
        return TRY_AGAIN
    return int(failed)
