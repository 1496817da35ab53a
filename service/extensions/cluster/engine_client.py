"""The connection of a web worker to one engine process."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from service.background import keep_running
from service.engine.messages import EngineStatus, ModelInfo
from service.errors import EngineUnavailable
from service.extensions.cluster import frames
from service.web.image_stores import StoreUsage
from vitserve.documents import ListedModel

logger = logging.getLogger(__name__)

CONNECTION_LOST: Final = "the engine ended and is being restarted"
SILENT: Final = "the engine gives no sign of life"

_RETRY_SECONDS: Final = 0.1

# An engine sends a heartbeat every second. After this many checks without a heartbeat, it gets no
# new requests: 3 s. The supervisor kills it later, because a busy machine delays a healthy engine,
# too. If this process is stopped, it does not check.
_CHECK_SECONDS: Final = 0.5
_MAX_SILENT_CHECKS: Final = 6


class EngineClient:
    """A connection to one engine process, and later to its successor, on one event loop.

    Args:
        path: path of the engine's socket.
        device: device in the status before the engine publishes one.

    Attributes:
        models: descriptions of the engine's generations, by model name and generation number.
        withdrawn: generations that must not get new requests.
        pending: this worker's requests without a result, by id.
        listed, tally, refused, kept: last published values, see `frames.StatusChanged`.
    """

    def __init__(self, path: Path, device: str) -> None:
        self.models: dict[str, dict[int, ModelInfo]] = {}
        self.withdrawn: set[tuple[str, int]] = set()
        self.listed: dict[str, ListedModel] = {}
        self.tally: dict[str, int] = {}
        self.refused: frozenset[str] = frozenset()
        self._published = EngineStatus(device, "loading", "the model is loading", "", None, 0)
        self._silent_checks = 0
        self.kept = StoreUsage()
        self._path = path
        self._on_change: Callable[[], None] = lambda: None
        self._connection: frames.Connection | None = None
        self._uses: dict[str, tuple[int, int, bool]] = {}
        self.pending: dict[int, tuple[frames.Request, asyncio.Future[Any]]] = {}
        self._ids = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_silent(self) -> bool:
        """Return whether the engine is connected, but has sent no heartbeat for too long."""
        return self._silent_checks >= _MAX_SILENT_CHECKS

    @property
    def status(self) -> EngineStatus:
        """Return the last published status; a silent engine counts as failed."""
        if self.is_silent and self._published.state == "ready":
            return replace(self._published, state="failed", reason=SILENT)
        return self._published

    @property
    def info(self) -> ModelInfo | None:
        """Return the default model's newest description; None before the model is loaded."""
        default_name = next((name for name, status in self.listed.items() if status.default), "")
        generations = self.models.get(default_name)
        return generations[max(generations)] if generations else None

    def start(self, on_change: Callable[[], None]) -> None:
        """Connect, and reconnect whenever the connection ends.

        Args:
            on_change: called when the status changes.
        """
        self._on_change = on_change
        self._tasks = [
            keep_running("engine-connection", self._stay_connected),
            keep_running("engine-silence", self._watch),
        ]

    def send(self, frame: frames.Frame) -> None:
        """Send a frame; raises `EngineUnavailable` without a connection."""
        if self._connection is None:
            raise EngineUnavailable(self.status.reason or CONNECTION_LOST)
        self._connection.send(frame)

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
            if self._connection is not None:
                self.send(frames.Cancel(id_))
            raise
        finally:
            self.pending.pop(id_, None)

    def use(self, name: str, newest: int, oldest: int, *, busy: bool) -> None:
        """Tell the engine which generations of a model this worker uses, and forget older ones.

        No effect if the engine knows already, or has no such generation. See `frames.Uses`.
        """
        generations = self.models.get(name, {})
        busy = busy and len(self.models) > 1  # the engine never unloads its only model
        is_known = newest in generations or any(
            (name, number) in self.withdrawn for number in generations
        )
        if not is_known or self._uses.get(name) == (newest, oldest, busy):
            return
        self._uses[name] = newest, oldest, busy
        for number in [number for number in generations if number < oldest]:
            del generations[number]
            self.withdrawn.discard((name, number))
        self.send(frames.Uses(name, newest, oldest, busy))

    async def close(self) -> None:
        """Disconnect; pending requests fail with `EngineUnavailable`."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def check(self) -> None:
        """Count a check since the engine's last heartbeat."""
        if self._connection is None or self.is_silent:
            return
        self._silent_checks += 1
        if self.is_silent:
            logger.warning(
                "engine %s: no sign of life; it gets no new requests", self._published.device
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
                    frames.Connection, str(self._path)
                )
            except OSError:  # the engine is starting
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            self._connection = connection
            try:
                async for frame in connection:
                    self._note_heartbeat()
                    self._receive(frame)
            except frames.FrameError as error:
                logger.error("connection to an engine: %s", error)
            finally:
                self._disconnected()
            await asyncio.sleep(_RETRY_SECONDS)

    def _disconnected(self) -> None:
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        self.models.clear()
        self.withdrawn.clear()
        self._uses.clear()
        self._silent_checks = 0
        for _, future in self.pending.values():
            if not future.done():
                future.set_exception(EngineUnavailable(CONNECTION_LOST))
        if self._published.state != "closed":  # a closed engine has published its reason
            self._published = replace(
                self._published, state="failed", reason=CONNECTION_LOST, queue_depth=0
            )
        self._on_change()

    def _note_heartbeat(self) -> None:
        was_silent = self.is_silent
        self._silent_checks = 0
        if was_silent:
            logger.warning("engine %s: it gives signs of life again", self._published.device)
            self._on_change()

    def _receive(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Alive():
                pass
            case frames.StatusChanged(status, kept, listed, tally, refused):
                states = {name: model.state for name, model in listed.items()}
                changed = (
                    status.state != self._published.state
                    or states.keys() != self.listed.keys()
                    or tally != self.tally
                )
                self._published = status
                self.kept = kept
                self.listed = listed
                self.tally = tally
                self.refused = refused
                if changed:
                    self._on_change()
            case frames.Serving(model, generation, info):
                self.models.setdefault(model, {})[generation] = info
                self.withdrawn.discard((model, generation))
                self._uses.pop(model, None)
                if self._published.state == "ready":  # otherwise the status follows
                    self._on_change()
            case frames.Withdrawn(model, generation):
                # Older generations are withdrawn, too, even if this worker never used this one.
                known = self.models.get(model, {})
                older = [number for number in known if number <= generation]
                self.withdrawn.update((model, number) for number in (*older, generation))
                self._on_change()
            case frames.Answer() | frames.Failed():
                request, future = self.pending.get(frame.id, (None, None))
                if request is None or future is None or future.done():
                    return  # its request was cancelled
                if isinstance(frame, frames.Failed):
                    future.set_exception(frame.error())
                else:
                    future.set_result(frames.result_of(frame, request))
            case _:
                raise frames.FrameError(f"{type(frame).__name__} out of order")
