"""Serves the models of an engine process to web workers.

    web worker                                     engine process
    ----------                                     --------------
    RemoteEngine.infer                             EngineServer
      Submit          --- Unix socket, frames -->    LocalEngine.submit -> batch queue
      future  <-- Answer or Failed, ---------------  answers of a batch leave together,
                  one wake-up per batch              so a worker wakes up once

The requests of all workers meet in one queue, and share batches. A worker that dies loses only its
own requests. If an engine dies, its requests fail with `EngineUnavailable`. The worker then
connects to its successor at the same address: a socket in a folder that only this user may enter.

Each worker gets a lease on each version that serves. `LocalModel` therefore closes an old version
when no worker has a request of it left.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from model.images.preprocess import ModelInput
from service.background import Tasks, keep_running
from service.engine.backbones import ModelEngine
from service.engine.messages import InferenceRequest
from service.engine.streams import Outcome
from service.errors import CheckpointRefused, InferenceFailed, ServiceError
from service.extensions.cluster import frames
from service.extensions.cluster.connection import Connection
from service.models.local_models import LocalModels
from service.models.version import Version
from service.web.image_stores import MemoryImageStore

logger = logging.getLogger("vitserve")

_FINISH_SECONDS: Final = 1.0


class EngineServer:
    """Serves the models of this process to workers of other processes.

    Args:
        shared: memory that the workers share with this process; see `shared_pixels`.
        restarts: number of restarts of the process.
        on_change: called when the state of a model changes, or another version takes over.
        refresh_seconds: interval of heartbeats, and of checks for status changes without an event,
            such as the queue's depth.
    """

    def __init__(
        self,
        models: LocalModels,
        images: MemoryImageStore,
        shared: memoryview,
        *,
        restarts: int = 0,
        on_change: Callable[[], None] = lambda: None,
        refresh_seconds: float = 1.0,
    ) -> None:
        self.models = models
        self.images = images
        self.workers: set[_Worker] = set()
        self.worker_changed = asyncio.Event()
        self.shared = shared
        self._serving = Tasks()
        self._restarts = restarts
        self._on_change = on_change
        self._refresh_seconds = refresh_seconds
        self._last_status: frames.StatusChanged | None = None

    async def start(self, path: Path) -> None:
        """Start loading the models, and accept connections on a socket with this path."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(partial(Connection, self._accept), str(path))
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

    async def used_by_all(self, name: str) -> None:
        """Wait until all workers give new requests to the current version of a model.

        The wait also ends if another version follows, or the model is deleted.
        """
        model = self.models.served.get(name)
        version = None if model is None else model.current
        while (
            model is not None
            and version is model.current
            and version.engine.ready
            and self.models.served.get(name) is model
            and not all(worker.uses(version) for worker in self.workers)
        ):
            self.worker_changed.clear()
            await self.worker_changed.wait()

    def _accept(self, connection: Connection) -> Callable[[frames.Frame], None]:
        worker = _Worker(self, connection)
        self.workers.add(worker)
        self._serving.begin(self._serve(worker, connection))
        return worker.handle

    async def _serve(self, worker: "_Worker", connection: Connection) -> None:
        try:
            worker.announce()
            worker.send(self.status)
            await connection.ended()
        except frames.FrameError as error:
            logger.error("connection of a worker: %s", error)
        finally:
            self.workers.discard(worker)
            self.worker_changed.set()
            await worker.close()

    def _changed(self) -> None:
        for worker in self.workers:
            worker.announce()
        self.worker_changed.set()
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


class _Grant:
    """A lease of a worker on a version of a model.

    Attributes:
        is_recalled: whether the worker was told that new requests must not use it.
        is_used: whether the worker gives new requests to it, or has done so.
    """

    def __init__(self, model: str, version: Version[ModelEngine]) -> None:
        self.model = model
        self.version = version
        self.is_recalled = False
        self.is_used = False
        self._is_busy = False
        version.grant()

    def use(self, *, is_busy: bool) -> None:
        """Note whether the worker has requests, so that the version is not evicted."""
        self.is_used = True
        if is_busy and not self._is_busy:
            self.version.hold()
        elif self._is_busy and not is_busy:
            self.version.release()
        self._is_busy = is_busy

    def end(self) -> None:
        """Release the version."""
        self.use(is_busy=False)
        self.version.take_back()


class _Worker:
    """One worker's leases and requests in the engine's process."""

    def __init__(self, server: EngineServer, connection: Connection) -> None:
        self.send = connection.send
        self._server = server
        self._connection = connection
        self._grants: dict[int, _Grant] = {}
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        # Requests without an answer, by id, with functions that cancel them.
        self._pending: dict[int, Callable[[], object]] = {}
        self._swap: _Swap | None = None

    def announce(self) -> None:
        """Grant a lease on each version that serves, and then recall the leases on others."""
        served = {model.current: name for name, model in self._server.models.served.items()}
        granted = {grant.version for grant in self._grants.values()}
        for version, name in served.items():
            info = version.engine.info
            if info is not None and version.engine.ready and version not in granted:
                id_ = next(self._ids)
                self._grants[id_] = _Grant(name, version)
                self.send(frames.Granted(id_, name, version.number, info))
        for id_, grant in self._grants.items():
            if grant.version not in served and not grant.is_recalled:
                grant.is_recalled = True
                self.send(frames.Recalled(id_, grant.model))

    def uses(self, version: Version[ModelEngine]) -> bool:
        """Return whether the worker gives new requests to a version."""
        grants = self._grants.values()
        return any(grant.version is version and grant.is_used for grant in grants)

    def handle(self, frame: frames.Frame) -> None:
        """Handle a request."""
        match frame:
            case frames.Call(id_, frames.Submit() as submit):
                self._submit(id_, submit)
            case frames.Call(id_, request):
                task = asyncio.create_task(self._answer(id_, request))
                self._tasks.add(task)
                task.add_done_callback(partial(self._ended, id_))
                self._pending[id_] = task.cancel
            case frames.Cancel(id_):
                cancel = self._pending.get(id_)
                if cancel is not None:  # otherwise the answer was sent already
                    cancel()
            case frames.InUse(lease, busy):
                self._grants[lease].use(is_busy=busy)
                self._server.worker_changed.set()
            case frames.Returned(lease):
                self._grants.pop(lease).end()
            case _:
                raise frames.FrameError(f"{type(frame).__name__} out of order")

    async def finish(self) -> None:
        """Send the pending answers, and close."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_FINISH_SECONDS)
        self._connection.close()

    async def close(self) -> None:
        """Cancel the worker's requests, because the worker has disconnected."""
        self._connection.close()
        for cancel in list(self._pending.values()):
            cancel()
        await self._discard("the web worker that led the swap ended")
        for grant in self._grants.values():
            grant.end()

    def _submit(self, id_: int, submit: frames.Submit) -> None:
        """Queue an image, whose answer is sent when its batch is computed."""
        try:
            engine = self._grants[submit.lease].version.engine
            answer = partial(self._send_outcome, id_)
            image = InferenceRequest(submit.pixels.array(self._server.shared), submit.requested)
            self._pending[id_] = engine.submit(image, submit.timeout, answer)
        except Exception as error:  # noqa: BLE001  a defect fails only its own request
            self._send_error(id_, error)

    def _send_outcome(self, id_: int, outcome: Outcome) -> None:
        del self._pending[id_]
        if isinstance(outcome, ServiceError):
            self._send_error(id_, outcome)
            return
        try:
            self.send(frames.Reply(id_, outcome))
        except Exception as error:  # noqa: BLE001  a defect fails only its own request
            self._send_error(id_, error)

    def _send_error(self, id_: int, error: Exception) -> None:
        if not isinstance(error, ServiceError) or type(error) not in frames.ERRORS:
            logger.error("a request failed", exc_info=error)
            error = InferenceFailed("the engine failed on this request")
        self.send(frames.Failed.of(id_, error))

    async def _answer(self, id_: int, request: frames.Request) -> None:
        try:
            self.send(frames.Reply(id_, await self._result(request)))
        except Exception as error:  # noqa: BLE001  a defect fails only its own request
            self._server.publish_status()  # which has the count of failed loads
            self._send_error(id_, error)

    def _ended(self, id_: int, task: asyncio.Task[None]) -> None:
        self._tasks.remove(task)
        del self._pending[id_]
        if task.cancelled():  # perhaps before it began
            self._send_error(id_, InferenceFailed("the caller has left"))

    async def _result(self, request: frames.Request) -> object:
        result: object = None
        match request:
            case frames.EmbedTexts(lease, texts, timeout):
                engine = self._grants[lease].version.engine
                result = await engine.embed_texts(texts, timeout=timeout)
            case frames.Put(pixels, region, image_id):
                picture = ModelInput(pixels.array(self._server.shared).copy(), region)
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
            case "load_next":
                swap = _Swap(models, change)
                await swap.load()
                self._swap = swap
            case "take_over":
                await self._take_over(model)
            case "discard":
                await self._discard(change.reason)
            case "load":
                await models.load(model or None, change.caller)
            case "unload":
                await models.unload(model)
            case "delete":
                await models.delete(model)
            case "reload":
                models.reload()

    async def _take_over(self, model: str) -> None:
        swap = self._swap
        self._swap = None  # it is decided once, even if the worker disconnects meanwhile
        if swap is None:
            raise CheckpointRefused("the engine restarted during the swap")
        await swap.decide(None)
        await self._server.used_by_all(model)

    async def _discard(self, reason: str) -> None:
        swap = self._swap
        self._swap = None
        if swap is not None:
            with suppress(CheckpointRefused):
                await swap.decide(CheckpointRefused(reason))


class _Swap:
    """A version that a worker loads in all engines, and that takes over once all have it."""

    def __init__(self, models: LocalModels, change: frames.Change) -> None:
        self._is_loaded = asyncio.Event()
        self._decision: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._replacing = asyncio.create_task(
            models.replace(change.model, change.checkpoint, agree=self._agree)
        )

    async def load(self) -> None:
        """Wait until the version is loaded; raises as `LocalModels.put`."""
        loaded = asyncio.create_task(self._is_loaded.wait())
        try:
            await asyncio.wait({loaded, self._replacing}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._replacing.cancel()
            raise
        finally:
            loaded.cancel()
        if self._replacing.done():
            self._replacing.result()

    async def decide(self, refusal: CheckpointRefused | None) -> None:
        """Make the version take over, or refuse it; raises as `LocalModels.put`.

        Cancelling this coroutine changes nothing, because other engines get the same decision.
        """
        if refusal is None:
            self._decision.set_result(None)
        else:
            self._decision.set_exception(refusal)
        await asyncio.shield(self._replacing)

    async def _agree(self) -> None:
        self._is_loaded.set()
        await self._decision
