"""The connection of a web worker to one engine process, and the versions that it may use there."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.background import keep_running
from service.engine.messages import EngineStatus, ModelInfo
from service.errors import EngineUnavailable
from service.extensions.cluster import frames
from service.extensions.cluster.connection import Connection
from service.extensions.cluster.shared_pixels import SharedPixels
from service.web.image_stores import StoreUsage

logger = logging.getLogger(__name__)

CONNECTION_LOST: Final = "the engine ended and is being restarted"
SILENT: Final = "the engine gives no sign of life"

_RETRY_SECONDS: Final = 0.1

# An engine sends a heartbeat every second. After this many checks without a heartbeat, it gets no
# new requests: 3 s. The supervisor kills it later, because a busy machine delays a healthy engine,
# too. If this process is stopped, it does not check.
_CHECK_SECONDS: Final = 0.5
_MAX_SILENT_CHECKS: Final = 6


@dataclass(eq=False, slots=True)
class EngineLease:
    """A version of a model in one engine process, which is kept there for this worker.

    Attributes:
        number: number of the version, equal in all engines.
        is_recalled: whether new requests must not use it.
        is_busy: whether the engine knows of requests of this worker; None before the first report.
        is_lost: whether the engine has ended.
    """

    client: "EngineClient"
    id: int
    model: str
    number: int
    info: ModelInfo
    is_recalled: bool = False
    is_busy: bool | None = None
    is_lost: bool = False

    @property
    def status(self) -> EngineStatus:
        """Return the status of the engine."""
        return self.client.status

    @property
    def is_usable(self) -> bool:
        """Return whether the engine answers requests."""
        return not self.is_lost and not self.client.is_silent

    def report(self, *, is_busy: bool) -> None:
        """Tell the engine whether requests use the lease; return a recalled one without requests.

        Args:
            is_busy: whether requests of the lease have not ended.
        """
        if not self.is_recalled:
            is_busy = is_busy and len(self.client.leases) > 1  # the only model is never unloaded
            if is_busy != self.is_busy:
                self.is_busy = is_busy
                self.client.send(frames.InUse(self.id, is_busy))
        elif not is_busy:
            del self.client.leases[self.model][self.id]
            self.client.send(frames.Returned(self.id))


class EngineClient:
    """A connection to one engine process, and later to its successor, on one event loop.

    Args:
        path: path of the engine's socket.
        device: device in the status before the engine publishes one.
        shared: this worker's buffers in the memory of the engine.

    Attributes:
        published: last published values.
        leases: versions that the engine keeps for this worker, by model name and lease number.
        pending: this worker's requests without an answer, by id.
    """

    def __init__(self, path: Path, device: str, shared: SharedPixels) -> None:
        status = EngineStatus(device, "loading", "the model is loading", "", None, 0)
        self.published = frames.StatusChanged(status, StoreUsage(), {}, {})
        self.leases: dict[str, dict[int, EngineLease]] = {}
        self.pending: dict[int, tuple[frames.Request, asyncio.Future[Any]]] = {}
        self._shared = shared
        self._silent_checks = 0
        self._path = path
        self._on_change: Callable[[], None] = lambda: None
        self._connection: Connection | None = None
        self._ids = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_silent(self) -> bool:
        """Return whether the engine is connected, but has sent no heartbeat for too long."""
        return self._silent_checks >= _MAX_SILENT_CHECKS

    @property
    def status(self) -> EngineStatus:
        """Return the last published status; a silent engine counts as failed."""
        status = self.published.status
        if self.is_silent and status.state == "ready":
            return replace(status, state="failed", reason=SILENT)
        return status

    def start(self, on_change: Callable[[], None]) -> None:
        """Connect, and reconnect whenever the connection ends.

        Args:
            on_change: called when the status or the leases change.
        """
        self._on_change = on_change
        self._tasks = [
            keep_running("engine-connection", self._stay_connected),
            keep_running("engine-silence", self._watch),
        ]

    async def close(self) -> None:
        """Disconnect; pending requests fail with `EngineUnavailable`."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def put(self, pixels: NDArray[np.uint8]) -> frames.Pixels:
        """Copy pixels for a request that follows at once; raises `EngineUnavailable` as `ask`."""
        if self._connection is None or self.is_silent:
            raise EngineUnavailable(self.status.reason or CONNECTION_LOST)
        return frames.Pixels.of(pixels, self._shared)

    async def ask(self, request: frames.Request) -> Any:
        """Send a request, and return its result; raises the error of a failed request.

        Raises:
            EngineUnavailable: the engine has ended, or is silent. A silent engine still gets the
                request to discard a load.
        """
        is_discard = isinstance(request, frames.Change) and request.act == "discard"
        if self.is_silent and not is_discard:
            raise EngineUnavailable(SILENT)
        id_ = next(self._ids)
        self.send(frames.Call(id_, request))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.pending[id_] = request, future
        try:
            return await future
        except asyncio.CancelledError:
            if id_ in self.pending:
                self.send(frames.Cancel(id_))
            raise

    def send(self, frame: frames.Frame) -> None:
        """Send a frame; raises `EngineUnavailable` without a connection."""
        if self._connection is None:
            raise EngineUnavailable(self.status.reason or CONNECTION_LOST)
        self._connection.send(frame)

    def check(self) -> None:
        """Count a check since the engine's last heartbeat."""
        if self._connection is None or self.is_silent:
            return
        self._silent_checks += 1
        if self.is_silent:
            logger.warning(
                "engine %s: no sign of life; it gets no new requests", self.status.device
            )
            self._on_change()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            self.check()

    async def _stay_connected(self) -> None:
        while True:
            try:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_unix_connection(
                    lambda: Connection(self._connected), str(self._path)
                )
            except OSError:  # the engine is starting
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            try:
                await connection.ended()
            except frames.FrameError as error:
                logger.error("connection to an engine: %s", error)
            finally:
                self._disconnected()
            await asyncio.sleep(_RETRY_SECONDS)

    def _connected(self, connection: Connection) -> Callable[[frames.Frame], None]:
        self._connection = connection
        return self._receive

    def _disconnected(self) -> None:
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        for leases in self.leases.values():
            for lease in leases.values():
                lease.is_lost = True
        self.leases.clear()
        self._silent_checks = 0
        for _, future in self.pending.values():
            if not future.done():
                future.set_exception(EngineUnavailable(CONNECTION_LOST))
        self.pending.clear()
        self._shared.clear()
        status = self.published.status
        if status.state != "closed":  # a closed engine has published its reason
            status = replace(status, state="failed", reason=CONNECTION_LOST, queue_depth=0)
            self.published = msgspec.structs.replace(self.published, status=status)
        self._on_change()

    def _note_heartbeat(self) -> None:
        was_silent = self.is_silent
        self._silent_checks = 0
        if was_silent:
            logger.warning("engine %s: it gives signs of life again", self.status.device)
            self._on_change()

    def _receive(self, frame: frames.Frame) -> None:
        if self._silent_checks:
            self._note_heartbeat()
        match frame:
            case frames.Answer() | frames.Failed():
                self._settle(frame)
            case frames.Alive():
                pass
            case frames.StatusChanged():
                before = self.published
                self.published = frame
                if (
                    frame.status.state != before.status.state
                    or frame.models.keys() != before.models.keys()
                    or frame.tally != before.tally
                ):
                    self._on_change()
            case frames.Granted(lease, model, version, info):
                granted = EngineLease(self, lease, model, version, info)
                self.leases.setdefault(model, {})[lease] = granted
                if self.published.status.state == "ready":  # otherwise the status follows
                    self._on_change()
            case frames.Recalled(lease, model):
                self.leases[model][lease].is_recalled = True
                self._on_change()
            case _:
                raise frames.FrameError(f"{type(frame).__name__} out of order")

    def _settle(self, frame: frames.Answer | frames.Failed) -> None:
        request, future = self.pending[frame.id]
        if future.done():
            pass  # its request was cancelled
        elif isinstance(frame, frames.Failed):
            future.set_exception(frame.error())
        else:
            future.set_result(frames.result_of(frame, request))
        del self.pending[frame.id]
        if isinstance(request, frames.Submit | frames.Put):
            self._shared.free(request.pixels.data)
