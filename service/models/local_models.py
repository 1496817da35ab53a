"""The models whose engines are in this process: loaded one at a time, replaced, unloaded, deleted.

    put       prepare (load the next version) -> take_over, or discard -> fit the memory
    load      load an unloaded model, once for all requests that wait for it
    unload    give the memory back until a request comes
    delete    remove the name, and close its versions after their last requests

Loads take turns: at any time one model is being loaded. `prepare` begins the turn of a `put`, and
`take_over` or `discard` ends it, perhaps on a message from another process. So `_turn` is a lock
that one method acquires and two others release.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from service.engine.backbones import ModelEngine, What
from service.errors import (
    CheckpointRefused,
    EngineUnavailable,
    ModelsFull,
    NameTaken,
    ServiceError,
    SwapUnderWay,
    UnknownModel,
)
from service.models.configured import configured_models
from service.models.factory import ModelFactory
from service.models.folder import FolderEntry
from service.models.generation import Version
from service.models.local_model import LocalModel, Prepared
from service.models.registry import SWAP_UNDER_WAY, Models
from service.models.residency import LEAVE_SECONDS, Residency
from service.settings import Settings

logger = logging.getLogger("vitserve")

LOAD_SECONDS: Final = 600.0
"""Longest load of a next checkpoint, warm-up included; the first load may take any time."""


class LocalModels(Models):
    """Models whose engines are in this process.

    Args:
        settings: settings of the service.
        make: returns an engine, not started yet, for a model's own settings.
        configured: entries of the folder, see `configured_models`.
        versions: versions by name that another process served instead of the configured ones.
        on_retired: called when an old version of a model is closed and forgotten.
        clock: monotonic seconds.

    Attributes:
        versions: versions by name that are served, or deleted, instead of the configured ones.
    """

    served: dict[str, LocalModel]  # type: ignore[assignment]  # only models of this process

    def __init__(
        self,
        settings: Settings,
        make: Callable[[Mapping[str, Any]], ModelEngine],
        configured: Mapping[str, FolderEntry] | None = None,
        versions: Mapping[str, Version] | None = None,
        *,
        on_retired: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._factory = ModelFactory(settings, make, configured, versions, on_retired)
        self.versions = self._factory.versions
        super().__init__(self._factory.models(), self._factory.default)
        self.results: Counter[str] = Counter()
        self._memory = Residency(
            self.served,
            settings.models_bytes,
            kept=self._kept,
            results=self.results,
            tasks=self._tasks,
            clock=clock,
        )
        self._prepared: Prepared | None = None
        self._turn = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._waiters: Counter[str] = Counter()

    @property
    def failure(self) -> str:
        """Return why the process cannot go on, or an empty text.

        It cannot if the default model failed, a model that had served, or every model; with strict
        settings, if any model failed.
        """
        failed = [model for model in self.served.values() if model.state == "failed"]
        all_are_fatal = self._settings.strict or len(failed) == len(self.served)
        for model in failed:
            if all_are_fatal or model.broke or model.is_default:
                return model.current.engine.status.reason
        return ""

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading, the default first; see `Models.start`."""
        self.on_change = on_change
        self._tasks.begin(self._load_all())

    async def close(self) -> None:
        """Close all models."""
        self._tasks.cancel()
        await asyncio.gather(*(model.close() for model in self.served.values()))

    # Load

    async def load(self, name: str | None, caller: str = "") -> None:
        """Wait until a model answers, and load it if it is unloaded; see `Models.load`."""
        key = self.key(name)
        # It is ready once it is loaded, even if it is unloaded again before this coroutine goes on.
        generation = self.served[key].current
        self._waiters[key] += 1
        try:
            while (
                not generation.engine.ready
                and key in self.served
                and self.served[key].state in ("loading", "unloaded")
            ):
                load = self._loads.get(key)
                if load is None or load.done():
                    load = self._begin_load(key, caller)
                await asyncio.shield(load)
        finally:
            self._waiters[key] -= 1
        if generation.engine.ready:
            return
        if key not in self.served:
            raise UnknownModel(f"{key!r}: the model was deleted")
        self.require_ready(key)

    async def answer_waiting(self, key: str) -> bool:
        """Before a removal, load an unloaded model if requests wait for it; return whether they do.

        Its version then answers them, unless it cannot be loaded.
        """
        model = self.served[key]
        if model.state not in ("unloaded", "loading"):
            return False
        is_needed = self._waiters[key] > 0 or model.current.requests > 0
        if is_needed:
            with suppress(ServiceError):
                await self.load(key)
        return is_needed

    async def _load_all(self) -> None:
        """Load each model in turn, even if it does not fit.

        Its description is then known, and requests that it would refuse do not load it.
        """
        for key, model in list(self.served.items()):
            if model.state == "loading":  # otherwise a request has had it loaded
                await asyncio.wait([self._begin_load(key, at_start=True)])

    def _begin_load(
        self, key: str, caller: str = "", *, at_start: bool = False
    ) -> asyncio.Task[None]:
        task = self._tasks.begin(self._load(key, caller, at_start=at_start))
        self._loads[key] = task
        return task

    async def _load(self, key: str, caller: str, *, at_start: bool) -> None:
        if key in self.served:
            # Its memory is needed. A request may hold it and wait for this load, so do not wait
            # for long.
            await self.served[key].retired(LEAVE_SECONDS)
        async with self._turn:
            model = self.served.get(key)
            if model is None or model.state == "ready":
                return
            evicted = self.results["evicted"]
            try:
                self._memory.require_share(caller, key)
                await self._memory.make_room(key, caller)
            except ModelsFull:
                if model.state == "loading":
                    model.current.move("unloaded")
                if not at_start:
                    self.results["failed"] += 1
                raise
            model.on_change = self.on_change
            reason = await model.bring()
            self.results["failed" if reason else "loaded"] += 1
            if reason and not model.is_default:
                logger.error("model %s: %s", key, reason)
                self._pass_default_on(key)
            try:
                await self._fit(key, caller, evict=not at_start or self._waiters[key] > 0)
            finally:
                has_evicted = self.results["evicted"] > evicted
                self._memory.charge(caller, model, has_evicted=has_evicted)

    def _pass_default_on(self, key: str) -> None:
        """Make another model the default, if the failed one was not named as the default."""
        if key == self.default_name:
            others = (name for name, model in self.served.items() if model.state != "failed")
            self.default_name = next(others, key)
            self.on_change()

    # Put

    async def put(self, name: str, what: What) -> bool:
        """Load a model, or replace one, even if the caller leaves; see `Models.put`."""
        return await asyncio.shield(self._tasks.begin(self._put(name, what)))

    async def prepare(self, name: str, what: What, *, in_turn: bool = False) -> bool:
        """Load a version, for `take_over` or `discard`; return whether the name is new.

        If this call is cancelled, the version is discarded.

        Args:
            name: name of the model.
            what: see `Models.put`. None means the configured checkpoint of a new model, of the
                default model if it is configured, and with `in_turn` of each configured model.
                For all other models, None means the served checkpoint.
            in_turn: whether to wait for the load under way.

        Raises:
            The errors of `put`.
        """
        key = self.key(name, is_new=True)
        if key in self.served and (in_turn or not self._turn.locked()):
            await self.answer_waiting(key)
        await self._take_turn(key, waits=in_turn)
        model = self.served.get(key)
        if what is None and model is not None:
            is_configured = key in self._factory.configured and (in_turn or model is self.default)
            if not is_configured:
                what = model.current.checkpoint
        try:
            if model is self.default and not model.current.engine.ready:
                raise EngineUnavailable(model.current.engine.status.reason)
            if model is not None and model.state == "unloaded":
                model.is_being_replaced = True
                self.on_change()
            await self._memory.make_room(key, "")
            await self._prepare(key, what)
        except BaseException as error:
            await self.discard(str(error), error)
            raise
        return model is None

    def take_over(self) -> str:
        """Make the prepared version answer new requests, and return its model's key."""
        assert self._prepared is not None, "a version was prepared"
        prepared = self._prepared
        self._prepared = None
        key, model, following = prepared
        if prepared.is_new:
            self.served[key] = model
            model.on_change = self.on_change
        elif key in self.served:  # otherwise it was deleted meanwhile, which closes all versions
            model.take_over(following)
            self.results["served"] += 1
            self.refused.discard(key)
        if key in self.served:
            self.versions[key] = Version(following.number, following.checkpoint)
        self.results["loaded"] += 1
        self._turn.release()
        self.on_change()
        return key

    async def discard(self, reason: str, error: BaseException | None = None) -> None:
        """Give up the version that was prepared, or could not be, for a reason."""
        if self._prepared is not None:
            prepared = self._prepared
            self._prepared = None
            if prepared.is_new:
                await prepared.model.close()
            else:
                await self._refuse(prepared, reason, error)
        for model in self.served.values():
            model.is_being_replaced = False
        if error is None or isinstance(error, CheckpointRefused | ModelsFull):
            self.results["failed"] += 1
        self._turn.release()

    async def fit(self, key: str) -> None:
        """Unload other models if memory is short; see `Residency.fit`."""
        async with self._turn:
            await self._fit(key, "", evict=True)

    async def _put(self, name: str, what: What, *, in_turn: bool = False) -> bool:
        is_new = await self.prepare(name, what, in_turn=in_turn)
        await self.fit(self.take_over())
        return is_new

    async def _prepare(self, key: str, what: What) -> None:
        """Load a version of a model while the current one serves; raises as `put`."""
        if key in self.served:
            model = self.served[key]
            following = model.generation(what, model.current.number + 1)
            checkpoint = what.get("checkpoint") if isinstance(what, Mapping) else what
            described = checkpoint or "the configured checkpoint"
            logger.info("loading %s beside the model that is served", described)
        else:
            number = self._factory.version(key).number + 1
            model = self._factory.model(key, Version(number, what))
            following = model.current
        self._prepared = Prepared(key, model, following)
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                reason = await model.load(following)
        except TimeoutError:
            reason = f"it was not loaded and warm within {LOAD_SECONDS:g} s"
        if reason:
            raise CheckpointRefused(reason)
        info = following.engine.info
        if info is not None and not key and (info.name in self.served or info.name in self.added):
            raise NameTaken(f"{info.name}: another model has the name of this checkpoint")

    async def _take_turn(self, key: str, *, waits: bool) -> None:
        """Begin a turn when the version before a model's current one is closed.

        So there are never three versions in memory. Other models may load meanwhile.

        Raises:
            SwapUnderWay: another load has the turn, and `waits` is false.
        """
        while waits or not self._turn.locked():
            await self._turn.acquire()
            model = self.served.get(key)
            if model is None or not model.is_retiring:
                return
            self._turn.release()
            await model.retired()
        raise SwapUnderWay(SWAP_UNDER_WAY)

    async def _refuse(self, prepared: Prepared, reason: str, error: BaseException | None) -> None:
        if not isinstance(error, asyncio.CancelledError):
            logger.error("the next checkpoint is refused, and the old one stays: %s", reason)
        self.results["refused"] += 1
        self.refused.add(prepared.key)
        await prepared.model.forget(prepared.following)

    # Remove

    async def unload(self, name: str) -> None:
        """Give a model's memory back; see `Models.unload`."""
        self._require_changeable(name)
        async with self._turn:
            if self.served[self.key(name)].state != "ready":
                return
            leaving = self._memory.unload([self.served[name]])
        await asyncio.shield(leaving)

    async def delete(self, name: str) -> None:
        """Remove a model; see `Models.delete`."""
        self._require_changeable(name)
        await self.answer_waiting(name)
        self._require_changeable(name)  # another request may have deleted it meanwhile
        model = self.served.pop(name)
        self.refused.discard(name)
        self.versions[name] = Version(model.current.number, gone=True)
        self._tasks.begin(model.leave())
        self.on_change()

    # Configuration

    async def _read_again(self) -> None:
        """Reconcile the models with the folder; load a single checkpoint again in any case."""
        before = self._factory.configured
        default = self.default_name
        entries = await asyncio.to_thread(configured_models, self._settings, before)
        configured = {default: before[default], **entries}
        self._factory.configured = configured
        for name in (before.keys() - configured.keys()) & self.served.keys():
            await self.delete(name)
        if default not in entries:
            logger.warning(
                "model %s is no longer in the folder, and stays because it is the default", default
            )
        for name, entry in entries.items():
            if before.get(name) is entry:  # the entry is broken now
                continue
            try:
                await self._reconcile(name, entry, before.get(name))
            except ServiceError as error:
                logger.warning("not reloaded: %s", error)

    async def _reconcile(self, name: str, entry: FolderEntry, before: FolderEntry | None) -> None:
        model = self.served.get(name)
        if model is None:
            number = self.versions[name].number + 1 if name in self.versions else 1
            self.versions[name] = Version(number)
            self.served[name] = self._factory.model(name)
            self._begin_load(name)
            return
        is_same = model.current.checkpoint is None and before == entry
        if not is_same or not entry.files:
            await self._put(name, None, in_turn=True)

    def _kept(self) -> set[str]:
        """Return the keys of models that are not unloaded for others."""
        return {self.default_name, *(key for key in self.served if self._waiters[key])}

    async def _fit(self, key: str, caller: str, *, evict: bool) -> None:
        await self._memory.fit(key, caller, evict=evict, may_leave=key != self.default_name)
