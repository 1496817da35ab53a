"""All models of a service by name, and what becomes of them: loaded one at a time, replaced,
unloaded, deleted.

    Models         what web code asks of any set
    LocalModels    those of the folder of models, or the one of `checkpoint`, in this process

The folder is the truth: what is loaded or deleted over HTTP lasts until the folder is read again.
"""

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from model.heads import Head
from model.label_texts import with_labels
from service.background import Tasks
from service.engine.local import ModelEngine, What
from service.engine.messages import EngineStatus, ModelInfo
from service.errors import (
    CheckpointRefused,
    DefaultModel,
    EngineUnavailable,
    Forbidden,
    HeadWithoutBackbone,
    HeadWithoutExamples,
    InvalidParameter,
    ModelFailed,
    ModelsFull,
    NameTaken,
    ServiceError,
    SettingsError,
    SwapUnderWay,
    UnknownModel,
)
from service.model_settings import PATHS, ModelSettings
from service.models.folder import Entry, in_time, read_folder, unread_names
from service.models.generation import Generation, LocalModel, ServedModel
from service.settings import Settings
from vitserve.documents import ListedModel

logger = logging.getLogger("vitserve")

_FITTED: Final = "it is being fitted"
UNDER_WAY: Final = "another checkpoint is being loaded: try again when that is done"

# Seconds in which the next checkpoint must be loaded and warm, or it is refused. The first may take
# any time.
LOAD_SECONDS: Final = 600.0

# Seconds in which a load waits for the last requests of what was unloaded for it; then there is no
# memory for it.
_LEAVE_SECONDS: Final = 1.0

# Seconds during which a backbone that was loaded for a caller is not unloaded for another request,
# and between two loads of one caller for which others are unloaded. A load takes all cores for a
# good part of a second.
RESIDENCY_SECONDS: Final = 30.0

# A caller of which neither a key nor an address is known, as over a Unix socket.
UNNAMED: Final = "unnamed"

load_caller: ContextVar[str] = ContextVar("load_caller", default="")
"""The caller to whose account loads go that begin in this context; empty for the operator's."""


@dataclass(slots=True)
class AddedHead:
    """A head beside the models, which scores the features of one of them.

    Attributes:
        head: None before there is one.
        key: of that model in `Models.served`; None: no model has the head's backbone.
        reason: why there is no such head, or no such model; empty while the head is fitted, and if
        it is there.
    """

    name: str
    head: Head | None
    key: str | None
    reason: str
    _described: tuple[ModelInfo, ModelInfo] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def info(self, info: ModelInfo) -> ModelInfo:
        """Return the description of the head as a model, by that of the model whose features it
        scores.
        """
        if self._described is None or self._described[0] is not info:
            self._described = info, self._of(info)
        return self._described[1]

    def _of(self, info: ModelInfo) -> ModelInfo:
        assert self.head is not None, "a head that answers is there"
        head, config = self.head, with_labels(info.config, self.head.labels)
        own = replace(
            info,
            name=self.name,
            labels=head.labels,
            config=config,
            temperature=head.temperature,
            taught=True,
        )
        own = replace(
            own,
            form=head.form,
            multi_label=False,
            zero_shot=None,
            coverage=None,
            calibrated_on=None,
        )
        return replace(own, has_thresholds=False, features=head.features)


class Version(NamedTuple):
    """A version of a model.

    Attributes:
        what: what was loaded, as `Models.put` has it; None: what is configured.
        gone: whether the model was deleted.
    """

    number: int = 1
    what: What = None
    gone: bool = False


class Models(ABC):
    """Models by name, of which one is the default's.

    Args:
        served: a name that is empty stands for that of the checkpoint.
        default: the key in `served` of the model that is asked where no name is given.

    Attributes:
        results: how many loads ended how, and how many backbones were unloaded for others; how many
            of the loads were swaps that were `served` or `refused`.
        refused: the keys in `served` of models whose last swap was refused.
        added: heads that are answered beside the models, by names that no model has.
    """

    added: Mapping[str, AddedHead] = MappingProxyType({})

    def __init__(self, served: Mapping[str, ServedModel], default: str = "") -> None:
        self.served = dict(served)
        self.default_name = default
        self.results: Mapping[str, int] = {}
        self.refused: set[str] = set()
        self.on_change: Callable[[], None] = lambda: None
        self._tasks = Tasks()
        self._reload_again = False
        self._reloading: asyncio.Task[None] | None = None

    @property
    def default(self) -> ServedModel:
        """Return the default model."""
        return self.served[self.default_name]

    def name_of(self, key: str) -> str:
        """Return the name of a model as answers have it."""
        info = self.served[key].info
        return key or (info.name if info is not None else "")

    def key(self, name: str | None) -> str:
        """Return where a model stands in `served`, None for the default's; for a head the one whose
        features it scores.

        Raises:
            UnknownModel: there is neither.
            HeadWithoutBackbone, HeadWithoutExamples: the head does not answer, and is not about to.
            EngineUnavailable: it is being fitted, or models are being loaded.
        """
        added = self.added.get(name or "")
        if added is not None:
            if added.key is None or added.head is None:
                waits, lacks = (
                    self._waits(added),
                    HeadWithoutBackbone if added.key is None else HeadWithoutExamples,
                )
                raise (EngineUnavailable if waits else lacks)(f"{name}: {added.reason or _FITTED}")
            return added.key
        if name is None or (
            name and name not in self.served and name == self.name_of(self.default_name)
        ):
            return self.default_name
        if not name or name not in self.served:
            names = ", ".join(self.names())
            raise UnknownModel(f"{name!r:.200}: no such model; there is {names:.2000}")
        return name

    def place(self, name: str) -> str:
        """Return where a model of this name stands, or is to stand, in `served`."""
        try:
            return self.key(name)
        except UnknownModel:
            return name

    def require_loadable(self, name: str | None) -> None:
        """Raise `ModelFailed` if a model could not be loaded.

        The default's failure is the service's.
        """
        key = self.key(name)
        model = self.served[key]
        if (
            model.state == "failed"
            and model is not self.default
            and self.default.current.engine.ready
        ):
            raise ModelFailed(f"{key}: {self.status_of(key).reason}")

    def find(self, name: str | None) -> ServedModel:
        """Return the model of a name, None for the default; raises `UnknownModel`."""
        return self.served[self.key(name)]

    def names(self) -> list[str]:
        """Return the names of all models and heads, in order."""
        return sorted([*map(self.name_of, self.served), *self.added])

    def describe(self) -> list[ListedModel]:
        """Return the status of each model and head, in the order of names."""
        every = *map(self.status_of, self.served), *map(self._status_of_head, self.added.values())
        return sorted(every, key=lambda status: status.name)

    def backbones(self) -> dict[str, int]:
        """Return the bytes of each backbone that is loaded."""
        every = map(self.status_of, self.served)
        return {
            each.backbone: each.bytes for each in every if each.state == "ready" and each.backbone
        }

    def reloads(self) -> dict[str, bool]:
        """Return whether the last swap of each model was served, or there was none, by its name."""
        return {self.name_of(key): key not in self.refused for key in self.served}

    def statuses(self) -> list[EngineStatus]:
        """Return those of all engines that compute, the default's first."""
        others = [
            model
            for model in self.served.values()
            if model is not self.default and model.state == "ready"
        ]
        engines = (model.current.engine for model in (self.default, *others))
        found = {id(getattr(engine, "backbone", engine)): engine.status for engine in engines}
        return list(found.values())

    @abstractmethod
    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading; `on_change` is called on the event loop when the state of a model changes."""

    @abstractmethod
    async def close(self) -> None:
        """Close all models."""

    @abstractmethod
    async def available(self, name: str | None) -> None:
        """Return when the model answers.

        Raises:
            ModelFailed: it could not be loaded.
            EngineUnavailable: it does not answer for another reason, and is not about to.
        """

    @abstractmethod
    async def put(self, name: str, what: What) -> bool:
        """Load a model, or replace the one of that name, and return whether it is a new name.

        Raises:
            CheckpointRefused: it cannot be served; what serves goes on.
            SwapUnderWay: another one is being loaded.
            EngineUnavailable: no model is ready yet.
            ModelsFull: there is no memory for it.
            NameTaken: it would be called as another model.
            Forbidden: the set is fixed.
        """

    @abstractmethod
    async def unload(self, name: str) -> None:
        """Give a model's memory back until somebody asks for it; raises `DefaultModel`,
        `Forbidden`, `UnknownModel`.
        """

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Remove a model, whose requests are answered; raises as `unload`."""

    def reload(self) -> None:
        """Begin to load what is configured as it is now, after what is being loaded; the log says
        how it ends.
        """
        self._reload_again = (
            True  # what is being loaded may have been read before the file was replaced
        )
        if self._reloading is None or self._reloading.done():
            self._reloading = self._tasks.begin(self._reload())

    async def _reload(self) -> None:
        while self._reload_again:
            self._reload_again = False
            try:
                await self._read_again()
            except (ServiceError, SettingsError) as error:
                logger.warning("not reloaded: %s", error)

    @abstractmethod
    async def _read_again(self) -> None:
        """Bring what is served to what is configured now."""

    def _require_changeable(self, name: str) -> None:
        if name in self.added:
            raise Forbidden(f"{name}: it is a taught head: DELETE /heads/{name} removes it")
        if self.key(name) == self.default_name:
            raise DefaultModel(
                f"{name!r:.200} is the default model: put another checkpoint in its place"
            )

    def _waits(self, added: AddedHead) -> bool:
        """Return whether a head that does not answer is being fitted, or may be of a model that is
        being loaded.
        """
        is_loading = any(model.state == "loading" for model in self.served.values())
        return is_loading if added.key is None else not added.reason

    def _status_of_head(self, added: AddedHead) -> ListedModel:
        if added.key is not None and added.head is not None:
            own = {
                "name": added.name,
                "classes": len(added.head.labels),
                "bytes": 0,
                "default": False,
                "taught": True,
            }
            return self.status_of(added.key).model_copy(update=own)
        return ListedModel(
            name=added.name,
            state="loading" if self._waits(added) else "failed",
            reason=added.reason or _FITTED,
            backbone="",
            bytes=0,
            default=False,
            taught=True,
        )

    def status_of(self, key: str) -> ListedModel:
        """Return the status of the model that stands there in `served`."""
        model, engine = self.served[key], self.served[key].current.engine
        info, now, is_ready = model.info, time.monotonic(), model.state == "ready"
        last_used: float | None = getattr(model, "last_used", None)
        return ListedModel(
            name=self.name_of(key),
            state=model.state,
            reason=""
            if is_ready
            else "its memory was given back"
            if model.unloaded
            else engine.status.reason,
            backbone="" if info is None else info.backbone,
            classes=None if info is None else info.config.num_classes,
            bytes=getattr(engine, "size", 0) if is_ready else 0,
            last_used_seconds=None if last_used is None else round(now - last_used, 3),
            default=key == self.default_name,
            taught=False,
        )


class LocalModels(Models):
    """Models whose engines are in this process.

    Args:
        settings: with the folder, or the one checkpoint, and the memory that models may take.
        make: returns an engine, not started yet, of a model by the settings of its own.
        configured: the folder's entries, as `configured_models` gives them.
        versions: what is served instead of what is configured, by name, where another process
        served it before.
        on_retired: called when an old version of a model is closed and forgotten.
        clock: monotonic seconds.

    Attributes:
        versions: what is served, or deleted, instead of what is configured, by name.
    """

    served: dict[str, LocalModel]  # type: ignore[assignment]  # a dict of what this process loads itself

    def __init__(
        self,
        settings: Settings,
        make: Callable[[Mapping[str, Any]], ModelEngine],
        configured: Mapping[str, Entry] | None = None,
        versions: Mapping[str, Version] | None = None,
        *,
        on_retired: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._make, self._on_retired = settings, make, on_retired
        self._clock = clock
        self._resident_until = dict[str, float]()  # by backbone
        self._charged_until = dict[str, float]()  # by caller
        self._configured = dict(configured or {"": Entry({}, {})})
        named = None if settings.models is None else settings.model_name
        self._default = default = named or next(iter(self._configured))
        self.versions = dict(versions or {})
        names = sorted(
            {*self._configured, *self.versions}, key=lambda name: (name != default, name)
        )
        super().__init__(
            {name: self._model(name) for name in names if not self._version(name).gone}, default
        )
        self.results: Counter[str] = Counter()
        self._prepared: tuple[str, LocalModel, Generation[ModelEngine]] | None = None
        self._turn = asyncio.Lock()
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._sizes: dict[str, int] = {}
        self._waiters: Counter[str] = Counter()
        self._leaving: set[Generation[ModelEngine]] = set()

    @property
    def failure(self) -> str:
        """Return why the process cannot go on, or an empty text: what it serves at least failed, or
        what served.
        """
        models = list(self.served.values())
        failed = [model for model in models if model.state == "failed"]
        fatal = [
            model for model in failed if model.broke or model.is_default or self._settings.strict
        ]
        if len(failed) == len(models):
            fatal = failed
        return fatal[0].current.engine.status.reason if fatal else ""

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading, the default first; see `Models.start`."""
        self.on_change = on_change
        self._tasks.begin(self._load_all())

    async def close(self) -> None:
        """Close all models."""
        self._tasks.cancel()
        await asyncio.gather(*(model.close() for model in self.served.values()))

    async def available(self, name: str | None) -> None:
        """Return when the model answers, which is loaded if it is not; see `Models.available`."""
        key = self.key(name)
        self._waiters[key] += 1
        try:
            while key in self.served and self.served[key].state in ("loading", "unloaded"):
                under_way = self._under_way.get(key)
                await asyncio.shield(
                    self._begin(key) if under_way is None or under_way.done() else under_way
                )
        finally:
            self._waiters[key] -= 1
        if key not in self.served:
            raise UnknownModel(f"{key!r}: the model was deleted")
        self.require_loadable(key)
        if self.served[key].state != "ready":
            raise EngineUnavailable(
                f"{key}: {self.served[key].current.engine.status.reason}".removeprefix(": ")
            )

    async def put(self, name: str, what: What) -> bool:
        """Load a model, or replace one; see `Models.put`. A caller who leaves does not end it."""
        return await asyncio.shield(self._tasks.begin(self._put(name, what)))

    async def prepare(self, name: str, what: What, *, in_turn: bool = False) -> bool:
        """Load a model, which `take_over` lets answer and `discard` gives up; return whether the
        name is new.

        Whoever cancels this call discards it. Raises as `put`; with `in_turn` what is being loaded
        is waited for, and None is what is configured. Else it is that for the default model alone,
        and for another what it serves.
        """
        key = self.place(name)
        if key in self.served and (in_turn or not self._turn.locked()):
            await self.answer_waiting(key)
        await self._take_turn(key, waits=in_turn)
        existing = self.served.get(key)
        if (
            what is None
            and existing is not None
            and (key not in self._configured or (not in_turn and existing is not self.default))
        ):
            what = existing.current.checkpoint
        try:
            if existing is self.default and not existing.current.engine.ready:
                raise EngineUnavailable(existing.current.engine.status.reason)
            if existing is not None and existing.unloaded:
                existing.is_leaving = True
                self.on_change()
            await self._make_room(key)
            await self._prepare(key, what)
        except BaseException as error:
            await self.discard(str(error), error)
            raise
        return existing is None

    async def _prepare(self, key: str, what: What) -> None:
        """Load a version of a model beside what serves; raises as `put`."""
        if key in self.served:
            model = self.served[key]
            following = model.generation(what, model.current.number + 1)
            named = what.get("checkpoint") if isinstance(what, Mapping) else what
            logger.info(
                "loading %s beside the model that is served", named or "the configured checkpoint"
            )
        else:
            model = self._model(key, Version(self._version(key).number + 1, what))
            following = model.current
        self._prepared = key, model, following
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
        """Begin a turn once the version before a model's current one is closed: there are never
        three in memory.

        Its last requests may take long, while others load; raises `SwapUnderWay` where they do and
        it is not to wait.
        """
        while waits or not self._turn.locked():
            await self._turn.acquire()
            model = self.served.get(key)
            if model is None or not model.is_retiring:
                return
            self._turn.release()
            await model.retired()
        raise SwapUnderWay(UNDER_WAY)

    def take_over(self) -> str:
        """Let what was prepared answer new requests, and return where it stands in `served`."""
        assert self._prepared is not None, "it was prepared"
        (key, model, following), self._prepared = self._prepared, None
        if following is model.current:  # of a new name
            self.served[key], model.on_change = model, self.on_change
        else:
            model.take_over(following)
            self.results["served"] += 1
            self.refused.discard(key)
        if key in self.served:  # else it was deleted meanwhile
            self.versions[key] = Version(model.current.number, model.current.checkpoint)
        self.results["loaded"] += 1
        self._turn.release()
        self.on_change()
        return key

    async def discard(self, reason: str, error: BaseException | None = None) -> None:
        """Give up what was prepared, or failed to be, for a reason."""
        if self._prepared is not None:
            (key, model, following), self._prepared = self._prepared, None
            if following is model.current:
                await model.close()
            else:
                if not isinstance(error, asyncio.CancelledError):
                    logger.error(
                        "the next checkpoint is refused, and the old one goes on: %s", reason
                    )
                self.results["refused"] += 1
                self.refused.add(key)
                await model.forget(following)
        for each in self.served.values():
            each.is_leaving = False
        self.results["failed"] += error is None or isinstance(
            error, (CheckpointRefused, ModelsFull)
        )
        self._turn.release()

    async def answer_waiting(self, key: str) -> bool:
        """Load a model that is to go, if requests for it are here: its version answers them; return
        whether some are.

        One that cannot be loaded answers none.
        """
        model = self.served[key]
        if model.state not in ("unloaded", "loading"):
            return False
        is_asked = bool(self._waiters[key]) or model.current.requests > model.current.held
        if is_asked:
            with suppress(ServiceError):
                await self.available(key)
        return is_asked

    async def unload(self, name: str) -> None:
        """Give a model's memory back; see `Models.unload`."""
        self._require_changeable(name)
        async with self._turn:
            if self.find(name).state != "ready":
                return
            leaving = self._tasks.begin(self._leave([self.served[name]]))
        await asyncio.shield(leaving)

    async def delete(self, name: str) -> None:
        """Remove a model; see `Models.delete`."""
        self._require_changeable(name)
        await self.answer_waiting(name)
        self._require_changeable(name)  # it may be gone meanwhile
        model = self.served.pop(name)
        self.refused.discard(name)
        self.versions[name] = Version(model.current.number, gone=True)
        self._tasks.begin(model.leave())
        self.on_change()

    # How models come and go

    def _version(self, name: str) -> Version:
        return self.versions.get(name, Version(1 if name in self._configured else 0))

    def _model(self, name: str, version: Version | None = None) -> LocalModel:
        number, what, _ = version or self._version(name)
        model = LocalModel(partial(self._engine, name), what, number, on_retired=self._on_retired)
        # Of several, none of which is named as the default, any other may be that.
        model.is_default = name == self._default and (
            bool(self._settings.model_name) or len(self._configured) == 1
        )
        return model

    def _engine(self, name: str, what: What) -> ModelEngine:
        own: dict[str, Any] = {"model_name": name} if name else {}
        if not isinstance(what, Mapping):
            configured = self._configured[name].settings if name in self._configured else {}
            what = configured if what is None else {**configured, "checkpoint": what}
        return self._make({**what, **own})

    def _begin(self, key: str, *, at_start: bool = False) -> asyncio.Task[None]:
        """Load a model that is not loaded, when it is its turn."""
        task = self._under_way[key] = self._tasks.begin(self._load(key, at_start=at_start))
        return task

    async def _load_all(self) -> None:
        """Load each model in turn, though it does not fit: its description tells what is refused
        without a load.
        """
        for name, model in list(self.served.items()):
            if model.state == "loading":  # else somebody has asked for it
                await asyncio.wait([self._begin(name, at_start=True)])

    async def _load(self, key: str, *, at_start: bool) -> None:
        if key in self.served:
            await self.served[
                key
            ].retired()  # a worker that releases the old one would release the same version
        async with self._turn:
            model = self.served.get(key)
            if model is None or model.state == "ready":
                return
            caller, evicted = load_caller.get(), self.results["evicted"]
            try:
                self._require_share(caller, self._lacking(key))
                await self._make_room(key)
            except ModelsFull:
                model.unloaded = True
                self.results["failed"] += not at_start
                raise
            model.on_change = self.on_change
            reason = await model.bring()
            self.results["failed" if reason else "loaded"] += 1
            if reason and not model.is_default:
                logger.error("model %s: %s", key, reason)
                self._pass_default_on(key)
            try:
                await self._fit(key, evict=not at_start or bool(self._waiters[key]))
            finally:
                self._charge(caller, model, has_evicted=self.results["evicted"] > evicted)

    def _pass_default_on(self, key: str) -> None:
        """Let the next model be the default, if that is none that was named, and cannot be loaded."""
        if key == self.default_name:
            left = (name for name, model in self.served.items() if model.state != "failed")
            self.default_name = next(left, key)
            self.on_change()

    async def _put(self, name: str, what: What, *, in_turn: bool = False) -> bool:
        is_new = await self.prepare(name, what, in_turn=in_turn)
        await self.fit(self.take_over())
        return is_new

    async def fit(self, key: str) -> None:
        """Unload others if there is too much now that a model is loaded, or that model; raises
        `ModelsFull`.
        """
        async with self._turn:
            await self._fit(key, evict=True)

    async def _read_again(self) -> None:
        """Bring what is served to what is configured now; a checkpoint that is no entry is loaded
        again.
        """
        before, default = self._configured, self.default_name
        entries = await asyncio.to_thread(configured_models, self._settings, before)
        self._configured = {default: before[default], **entries}
        for name in (before.keys() - self._configured.keys()) & self.served.keys():
            await self.delete(name)
        if default not in entries:
            logger.warning(
                "model %s is no longer in the folder, and stays, as it is the default", default
            )
        for name, entry in entries.items():
            model = self.served.get(name)
            is_same = (
                model is not None and model.current.checkpoint is None and before.get(name) == entry
            )
            if before.get(name) is entry or (
                is_same and entry.files
            ):  # broken meanwhile, or as it was
                continue
            try:
                if model is None:
                    number = self.versions[name].number + 1 if name in self.versions else 1
                    self.versions[name] = Version(number)
                    self.served[name] = self._model(name)
                    self._begin(name)
                else:
                    await self._put(name, None, in_turn=True)
            except ServiceError as error:
                logger.warning("not reloaded: %s", error)

    # Memory

    def _needed(self, key: str) -> int:
        """Return what a model would take, as far as it is known: nothing beside others of its
        backbone.
        """
        model = self.served.get(key)
        info = None if model is None else model.info
        return (
            0
            if info is None or info.backbone in self._loaded()
            else self._sizes.get(info.backbone, 0)
        )

    def _loaded(self) -> dict[str, int]:
        """Return the bytes of each backbone that is loaded, with those that only end their last
        requests.
        """
        engines = (generation.engine for generation in self._leaving)
        return {
            engine.info.backbone: engine.size for engine in engines if engine.info
        } | self.backbones()

    async def _leave(self, models: list[LocalModel]) -> None:
        """Unload models, whose memory counts until their last requests have ended."""
        leaving = {model.current for model in models}
        self._leaving |= leaving
        await asyncio.gather(*(model.unload() for model in models))
        self._leaving -= leaving

    async def _give_back(self, models: list[LocalModel]) -> None:
        """Unload models, but do not wait long for their last requests: other loads wait for their
        turn.
        """
        await asyncio.wait([self._tasks.begin(self._leave(models))], timeout=_LEAVE_SECONDS)

    def _lacking(self, key: str) -> int:
        """Return the bytes that a model lacks beside those that are loaded, 0 if it fits."""
        most = self._settings.models_bytes
        if most is None:
            return 0
        return max(0, sum(self._loaded().values()) + self._needed(key) - most)

    def _require_share(self, caller: str, lacking: int) -> None:
        """Raise `ModelsFull` where others would be unloaded again for a caller for whom that was
        done just now.
        """
        seconds = self._charged_until.get(caller, 0.0) - self._clock()
        if lacking and seconds > 0:
            raise _full(
                f"others were unloaded for this caller less than {RESIDENCY_SECONDS:g} s ago",
                seconds,
            )

    def _charge(self, caller: str, model: LocalModel, *, has_evicted: bool) -> None:
        """Write a load down, and whether others were unloaded for it, where a caller asked for it."""
        if not caller:
            return
        now = self._clock()
        self._charged_until = {
            each: until for each, until in self._charged_until.items() if until > now
        }
        if has_evicted:
            self._charged_until[caller] = now + RESIDENCY_SECONDS
        if model.info is not None and model.state == "ready":
            self._resident_until[model.info.backbone] = now + RESIDENCY_SECONDS

    async def _make_room(self, key: str) -> None:
        """Unload backbones until a model fits beside the others; raises `ModelsFull`."""
        while lacking := self._lacking(key):
            await self._evict(key, lacking)

    async def _fit(self, key: str, *, evict: bool) -> None:
        """Unload others if there is too much now that a model is loaded, or that model; raises
        `ModelsFull`.
        """
        self._sizes |= self.backbones()
        model, most = self.served.get(key), self._settings.models_bytes
        if (
            model is None
            or model.state != "ready"
            or most is None
            or sum(self._loaded().values()) <= most
        ):
            return
        try:
            if evict:
                await self._make_room(key)
            elif model is not self.default:
                await self._give_back([model])
        except ModelsFull:
            if model is not self.default:
                await self._give_back([model])
            raise

    async def _evict(self, but: str, too_much: int) -> None:
        """Unload the backbone that is unused for longest, of those that have no work.

        Raises:
            ModelsFull: all of them together would not give back so many bytes.
        """
        users: dict[str, list[LocalModel]] = {}
        for model in self.served.values():
            if model.state == "ready" and model.info is not None:
                users.setdefault(model.info.backbone, []).append(model)
        kept = {
            self.served[key].info
            for key in self.served
            if key in (but, self.default_name) or self._waiters[key]
        }
        idle = [
            (max(max(model.last_used or 0.0, model.loaded) for model in models), backbone)
            for backbone, models in users.items()
            if not any(model.current.requests > model.current.held for model in models)
            and backbone not in {info.backbone for info in kept if info is not None}
        ]
        loaded = self.backbones()
        if sum(loaded.get(backbone, 0) for _, backbone in idle) < too_much:
            raise _full("it has no memory beside the models that are in use", 5)
        if load_caller.get():  # the operator's loads unload any
            now = self._clock()
            stays = {
                backbone: self._resident_until.get(backbone, now) - now for _, backbone in idle
            }
            idle = [(used, backbone) for used, backbone in idle if stays[backbone] <= 0]
            if sum(loaded.get(backbone, 0) for _, backbone in idle) < too_much:
                seconds = min(stay for stay in stays.values() if stay > 0)
                raise _full(
                    f"the others were loaded less than {RESIDENCY_SECONDS:g} s ago", seconds
                )
        _, backbone = min(idle)
        self.results["evicted"] += 1
        logger.info("backbone %s is unloaded: others need its memory", backbone)
        await self._give_back(users[backbone])


def _full(reason: str, seconds: float) -> ModelsFull:
    """Return the error of a model that is not loaded for want of memory, with the seconds until
    another try.
    """
    retry_after = max(1, math.ceil(seconds))
    return ModelsFull(
        f"{reason}: try again in {retry_after} s, or raise VIT_MODELS_BYTES", retry_after
    )


def configured_models(
    settings: Settings,
    before: Mapping[str, Entry] = MappingProxyType({}),
    *,
    log: int = logging.ERROR,
) -> dict[str, Entry]:
    """Return the models that settings name: of the folder, or one without a name.

    Broken entries are logged at a level, and are what they were before if they were there.

    Raises:
        SettingsError: there are none, or the default is none of them, or one is broken and that is
        to end the start.
    """
    if settings.models is None:
        return {"": Entry({}, {})}
    if settings.checkpoint != ModelSettings.model_fields["checkpoint"].default:
        raise SettingsError(
            f"VIT_CHECKPOINT={settings.checkpoint!r}: VIT_MODELS={settings.models!r} names the models already: "
            "set one of them"
        )
    folder = Path(settings.models).expanduser()
    others = () if settings.checkpoint_folder is None else (Path(settings.checkpoint_folder),)
    try:
        entries, problems = in_time(partial(read_folder, folder, others), "the folder")
    except NotADirectoryError:
        remedy = "expected a folder of models; --checkpoint (VIT_CHECKPOINT) serves one file"
        raise SettingsError(f"VIT_MODELS={settings.models!r}: {remedy}") from None
    except (OSError, InvalidParameter) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise SettingsError(f"VIT_MODELS={settings.models!r}: {reason or error}") from None
    for name, problem in problems.items():
        logger.log(log, "no model: %s", problem)
        entries |= {name: before[name]} if name in before else {}
    if problems and settings.strict:
        raise SettingsError(f"VIT_MODELS={settings.models!r}: {next(iter(problems.values()))}")
    if not entries:
        raise SettingsError(f"VIT_MODELS={settings.models!r}: there is no model in this folder")
    if settings.model_name not in (None, *entries):
        names = ", ".join(entries)
        raise SettingsError(
            f"VIT_MODEL_NAME={settings.model_name!r}: expected a model of VIT_MODELS: {names:.1000}"
        )
    return entries


def notes_on_folder(settings: Settings, entries: Mapping[str, Entry]) -> list[str]:
    """Return lines for an operator on what of the settings and the folder of models has no effect."""
    if settings.models is None:
        return []
    lines = []
    names = in_time(
        partial(unread_names, Path(settings.models).expanduser(), entries), "the folder"
    )
    if names:
        lines.append(f"VIT_MODELS={settings.models!r}: not read: {', '.join(names):.1000}")
    for setting in PATHS:
        of_its_own = [
            name for name, entry in entries.items() if entry.settings.get(setting) is not None
        ]
        if setting != "checkpoint" and getattr(settings, setting) is not None and of_its_own:
            variable = f"VIT_{setting.upper()}"
            lines.append(
                f"{variable} is not read for {', '.join(of_its_own):.1000}: they have {setting} of their own"
            )
    return lines
