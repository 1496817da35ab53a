"""All models of a service by name, and what becomes of them: loaded one at a time, replaced, unloaded, deleted.

    Models         a fixed set, and what web code asks of any set
    LocalModels    those of the folder of models, or the one of `checkpoint`, in this process

The folder is the truth: what is loaded or deleted over HTTP lasts until the folder is read again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from model.heads import Head, with_labels
from service.engine.backbones import ModelEngine, What
from service.engine.messages import EngineStatus, ModelInfo
from service.errors import (
    CheckpointRefused,
    DefaultModel,
    EngineUnavailable,
    Forbidden,
    ModelsFull,
    NameTaken,
    ServiceError,
    SettingsError,
    SwapUnderWay,
    UnknownModel,
)
from service.models.folder import Entry, read_folder
from service.models.model import UNDER_WAY, Loads, LocalModel, ModelState, ServedModel
from service.settings import Settings

logger = logging.getLogger("vitserve")

LoadResult = Literal["loaded", "failed", "evicted"]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What is said of a model in a list of all.

    Attributes:
        reason: why it is not ready; empty when it is.
        backbone: the same for models that share one; empty before it is known.
        classes: how many it has; None before that is known.
        bytes: measured, of its backbone; 0 while that is not loaded.
        last_used: seconds since its last picture; None before the first.
    """

    name: str
    state: ModelState
    reason: str
    backbone: str
    classes: int | None
    bytes: int
    last_used: float | None
    default: bool
    taught: bool = False


@dataclass(frozen=True, slots=True)
class AddedHead:
    """A head beside the models, which scores the features of one of them.

    Attributes:
        head: None before there is one.
        key: of that model in `Models.served`; None: no model has the head's backbone.
        reason: why it does not answer, whatever that model does; empty if it may.
    """

    name: str
    head: Head | None
    key: str | None
    reason: str

    def info(self, info: ModelInfo) -> ModelInfo:
        """Return the description of the head as a model, by that of the model whose features it scores."""
        assert self.head is not None, "a head that answers is there"
        head, config = self.head, with_labels(info.config, self.head.labels)
        own = replace(info, name=self.name, labels=head.labels, config=config, temperature=head.temperature)
        return replace(own, multi_label=False, zero_shot=None, coverage=None, calibrated_on=None)


class Models:
    """Models by name, of which one is the default's.

    Args:
        served: a name that is empty stands for that of the checkpoint.
        default: the key in `served` of the model that is asked where no name is given.

    Attributes:
        results: how many loads ended how, and how many backbones were unloaded for others.
        added: heads that are answered beside the models, by names that no model has.
    """

    added: Mapping[str, AddedHead] = MappingProxyType({})

    def __init__(self, served: Mapping[str, ServedModel], default: str = "") -> None:
        self.served = dict(served)
        self.default_name = default
        self.results: Counter[LoadResult] = Counter()
        self.on_change: Callable[[], None] = lambda: None

    @property
    def default(self) -> ServedModel:
        """Return the default model."""
        return self.served[self.default_name]

    @property
    def loads(self) -> Loads:
        """Return the counts of swaps of all models, and whether the default's last one serves."""
        every = [model.loads for model in self.served.values()]
        sums = (sum(getattr(each, field) for each in every) for field in ("served", "refused"))
        return Loads(*sums, last_successful=all(each.last_successful for each in every))

    def name_of(self, key: str) -> str:
        """Return the name of a model as answers have it."""
        info = self.served[key].info
        return key or (info.name if info is not None else "")

    def key(self, name: str | None) -> str:
        """Return where a model stands in `served`, None for the default's; for a head the one whose features it scores.

        Raises:
            UnknownModel: there is neither.
            EngineUnavailable: the head does not answer.
        """
        added = self.added.get(name or "")
        if added is not None:
            if added.key is None or added.reason:
                raise EngineUnavailable(f"{name}: {added.reason}")
            return added.key
        if name is None or (name and name not in self.served and name == self.name_of(self.default_name)):
            return self.default_name
        if not name or name not in self.served:
            names = ", ".join(sorted([*map(self.name_of, self.served), *self.added]))
            raise UnknownModel(f"{name!r:.200}: no such model; there is {names:.2000}")
        return name

    def find(self, name: str | None) -> ServedModel:
        """Return the model of a name, None for the default; raises `UnknownModel`."""
        return self.served[self.key(name)]

    def describe(self) -> list[ModelStatus]:
        """Return the status of each, in the order of names."""
        every = [*map(self._described, self.served), *map(self._described_head, self.added.values())]
        return sorted(every, key=lambda status: status.name)

    def backbones(self) -> dict[str, int]:
        """Return the bytes of each backbone that is loaded."""
        every = map(self._described, self.served)
        return {each.backbone: each.bytes for each in every if each.state == "ready" and each.backbone}

    def statuses(self) -> list[EngineStatus]:
        """Return those of all engines that compute, the default's first."""
        others = [model for model in self.served.values() if model is not self.default and model.state == "ready"]
        every = (each for model in (self.default, *others) for each in model.current.engine.engines)
        found = {id(getattr(each, "backbone", each)): each.status for each in every}
        return list(found.values())

    def tally(self) -> Mapping[str, int]:
        """Return how many loads ended how, and how many backbones were unloaded for others."""
        return {str(name): count for name, count in self.results.items()}

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading; `on_change` is called on the event loop when the state of a model changes."""
        self.on_change = on_change
        for model in self.served.values():
            model.start(on_change)

    async def close(self) -> None:
        """Close all models."""
        await asyncio.gather(*(model.close() for model in self.served.values()))

    async def available(self, name: str | None) -> None:
        """Return when the model answers; raises `EngineUnavailable` if it does not, and is not about to."""
        raise EngineUnavailable(self.find(name).current.engine.status.reason)

    async def put(self, name: str, what: What) -> bool:
        """Load a model, or replace the one of that name, and return whether it is a new name.

        Raises:
            CheckpointRefused, SwapUnderWay, EngineUnavailable: see `ServedModel.load`.
            ModelsFull: there is no memory for it.
            Forbidden: the set is fixed.
        """
        await self.find(name).load(what)
        return False

    async def unload(self, name: str) -> None:
        """Give a model's memory back until somebody asks for it; raises `DefaultModel`, `Forbidden`, `UnknownModel`."""
        self._require_changeable(name)

    async def delete(self, name: str) -> None:
        """Remove a model, whose requests are answered; raises as `unload`."""
        self._require_changeable(name)

    def reload(self) -> None:
        """Begin to load what is configured as it is now; the log says how it ends."""
        logger.warning("not reloaded: start the service again")

    def require_free(self, name: str) -> None:
        """Raise `NameTaken` if a head has the name of a model that is to be loaded."""
        if name in self.added:
            raise NameTaken(f"{name}: a taught head has this name: choose another one for the model")

    def _require_changeable(self, name: str) -> None:
        if name in self.added:
            raise Forbidden(f"{name}: it is a taught head: DELETE /heads/{name} removes it")
        if self.key(name) == self.default_name:
            raise DefaultModel(f"{name!r:.200} is the default model: put another checkpoint in its place")
        if type(self) is Models:
            raise Forbidden("here models are neither loaded nor deleted: start the service again with others")

    def _described_head(self, added: AddedHead) -> ModelStatus:
        is_loading = added.key is not None or any(model.state == "loading" for model in self.served.values())
        status = ModelStatus(added.name, "loading", added.reason, "", None, 0, None, default=False, taught=True)
        if added.key is None or added.head is None:
            return status if is_loading else replace(status, state="failed")
        base, classes = self._described(added.key), len(added.head.labels)
        return replace(base, name=added.name, classes=classes, bytes=0, default=False, taught=True)

    def _described(self, key: str) -> ModelStatus:
        model, engine = self.served[key], self.served[key].current.engine
        info, now, is_ready = model.info, time.monotonic(), model.state == "ready"
        last_used: float | None = getattr(model, "last_used", None)
        return ModelStatus(
            name=self.name_of(key),
            state=model.state,
            reason="" if is_ready else "its memory was given back" if model.unloaded else engine.status.reason,
            backbone="" if info is None else info.backbone,
            classes=None if info is None else info.config.num_classes,
            bytes=getattr(engine, "size", 0) if is_ready else 0,
            last_used=None if last_used is None else now - last_used,
            default=key == self.default_name,
        )


class LocalModels(Models):
    """Models whose engines are in this process.

    Args:
        settings: with the folder, or the one checkpoint, and the memory that models may take.
        make: returns an engine, not started yet, of what is to be loaded.
        configured: the folder's entries, as `configured_models` gives them.
        on_retired: called when an old version of a model is closed and forgotten.
    """

    served: dict[str, LocalModel]  # type: ignore[assignment]  # a dict of what this process loads itself

    def __init__(
        self,
        settings: Settings,
        make: Callable[[What], ModelEngine],
        configured: Mapping[str, Entry] | None = None,
        *,
        on_retired: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._make, self._on_retired = settings, make, on_retired
        self._configured = dict(configured or {"": Entry({}, {})})
        names = list(self._configured)
        default = _default_of(settings, self._configured)
        super().__init__({name: self._model(name) for name in sorted(names, key=lambda name: name != default)}, default)
        for name, model in self.served.items():
            model.is_default = name == default
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._sizes: dict[str, int] = {}
        self._is_full = self._reload_again = False
        self._reloading: asyncio.Task[None] | None = None

    @property
    def failure(self) -> str:
        """Return why the process cannot go on, or an empty text: what it serves at least failed, or what served."""
        failed = [
            model
            for model in self.served.values()
            if model.broke or (model.state == "failed" and (model.is_default or self._settings.strict))
        ]
        return failed[0].current.engine.status.reason if failed else ""

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading, the default first; see `Models.start`."""
        self.on_change = on_change
        for name in self.served:
            self._begin(name, at_start=True)

    async def close(self) -> None:
        """Close all models."""
        for task in self._tasks:
            task.cancel()
        await super().close()

    async def available(self, name: str | None) -> None:
        """Return when the model answers, which is loaded if it is not; see `Models.available`."""
        key = self.key(name)
        model = self.served[key]
        if model.state == "failed":
            raise EngineUnavailable(f"{name or ''}: {model.current.engine.status.reason}".removeprefix(": "))
        while model.state in ("loading", "unloaded"):
            await asyncio.shield(self._under_way.get(key) or self._begin(key))
        if model.state != "ready":
            raise EngineUnavailable(model.current.engine.status.reason)

    async def put(self, name: str, what: What) -> bool:
        """Load a model, or replace one; see `Models.put`. A caller who leaves does not end it."""
        if self._turn.locked():
            raise SwapUnderWay(UNDER_WAY)
        return await asyncio.shield(self._task(self._put(name, what)))

    async def unload(self, name: str) -> None:
        """Give a model's memory back; see `Models.unload`."""
        self._require_changeable(name)
        async with self._turn:
            if self.find(name).state == "ready":
                await self.served[name].unload()

    async def delete(self, name: str) -> None:
        """Remove a model; see `Models.delete`."""
        self._require_changeable(name)
        self._task(self.served.pop(name).leave())
        self.on_change()

    def reload(self) -> None:
        """Begin to load what is configured as it is now, after what is being loaded; the log says how it ends."""
        self._reload_again = True  # what is being loaded may have been read before the file was replaced
        if self._reloading is None or self._reloading.done():
            self._reloading = self._task(self._reload())

    # How models come and go

    def _model(self, name: str) -> LocalModel:
        return LocalModel(partial(self._engine, name), on_retired=self._on_retired)

    def _engine(self, name: str, what: What) -> ModelEngine:
        if not isinstance(what, Mapping):
            own = dict(self._configured[name].settings) if name in self._configured else {}
            what = own | ({} if what is None else {"checkpoint": what})
        return self._make({**what, "model_name": name} if name else what)

    def _begin(self, key: str, *, at_start: bool = False) -> asyncio.Task[None]:
        """Load a model that is not loaded, when it is its turn."""
        task = self._under_way[key] = self._task(self._load(key, at_start=at_start))
        task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return task

    async def _load(self, key: str, *, at_start: bool) -> None:
        async with self._turn:
            model = self.served.get(key)
            if model is None or model.state == "ready":
                return
            if at_start and self._is_full:
                model.unloaded = True
                return
            await self._make_room(key, self._needed(key))
            model.on_change = self.on_change
            reason = await model.bring()
            self.results["failed" if reason else "loaded"] += 1
            if reason and not model.is_default:
                logger.error("model %s: %s", key, reason)
            await self._fit(key, evict=not at_start)

    async def _put(self, name: str, what: What) -> bool:
        async with self._turn:
            key = name
            with suppress(UnknownModel):  # it is a new one
                key = self.key(name)
            existing = self.served.get(key)
            await self._make_room(key, self._needed(key))
            try:
                if existing is not None and (existing.state == "ready" or existing.is_default):
                    await existing.load(what)
                else:
                    await self._add(key, what, existing)
            except CheckpointRefused:
                self.results["failed"] += 1
                raise
            self.results["loaded"] += 1
            await self._fit(key, evict=True)
            self.on_change()
        return existing is None

    async def _add(self, name: str, what: What, existing: LocalModel | None) -> None:
        """Load a model beside the others, and let it take the place of one that is not ready; `CheckpointRefused`."""
        model = LocalModel(partial(self._engine, name), what, on_retired=self._on_retired)
        model.is_default, model.on_change = False, self.on_change
        if reason := await model.bring():
            await model.close()
            raise CheckpointRefused(reason)
        self.served[name] = model
        if existing is not None:
            await existing.close()

    async def _reload(self) -> None:
        while self._reload_again:
            self._reload_again = False
            try:
                await self._read_again(configured_models(self._settings))
            except SettingsError as error:
                logger.warning("not reloaded: %s", error)

    async def _read_again(self, entries: Mapping[str, Entry]) -> None:
        """Bring what is served to what is configured now; a checkpoint that is no entry is loaded again."""
        before, default = self._configured, self.default_name
        self._configured = {default: before[default], **entries}
        for name in (before.keys() - self._configured.keys()) & self.served.keys():
            await self.delete(name)
        if default not in entries:
            logger.warning("model %s is no longer in the folder, and stays, as it is the default", default)
        for name, entry in entries.items():
            model = self.served.get(name)
            is_same = model is not None and model.current.checkpoint is None and before.get(name) == entry
            if is_same and entry.files:
                continue
            try:
                if model is None:
                    self.served[name] = self._model(name)
                    self.served[name].is_default = False
                    await self._begin(name)
                else:
                    await self._put(name, None)
            except ServiceError as error:
                logger.warning("not reloaded: %s", error)

    def _task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a caller who has left asks for it no more

    # Memory

    def _needed(self, key: str) -> int:
        """Return what a model would take, as far as it is known: nothing beside others of its backbone."""
        model = self.served.get(key)
        info = None if model is None else model.info
        return 0 if info is None or info.backbone in self.backbones() else self._sizes.get(info.backbone, 0)

    async def _make_room(self, key: str, size: int) -> None:
        """Unload backbones until so many bytes fit beside the others; raises `ModelsFull`."""
        most = self._settings.models_bytes
        while most is not None and sum(self.backbones().values()) + size > most:
            await self._evict(key)

    async def _fit(self, key: str, *, evict: bool) -> None:
        """Unload others if there is too much now that a model is loaded, or that model; raises `ModelsFull`."""
        self._sizes |= self.backbones()
        model, most = self.served[key], self._settings.models_bytes
        if most is None or sum(self.backbones().values()) <= most or model.state != "ready":
            return
        try:
            self._is_full = not evict
            if evict:
                await self._make_room(key, 0)
            elif not model.is_default:
                await model.unload()
        except ModelsFull:
            if not model.is_default:
                await model.unload()
            raise

    async def _evict(self, but: str) -> None:
        """Unload the backbone that is unused for longest, of those that have no work; raises `ModelsFull`."""
        users: dict[str, list[LocalModel]] = {}
        for model in self.served.values():
            if model.state == "ready" and model.info is not None:
                users.setdefault(model.info.backbone, []).append(model)
        kept = {self.served[key].info for key in (but, self.default_name) if key in self.served}
        idle = [
            (max(model.last_used or 0.0 for model in models), backbone)
            for backbone, models in users.items()
            if not any(model.current.engine.backbone.engine.busy for model in models)
            and backbone not in {info.backbone for info in kept if info is not None}
        ]
        if not idle:
            raise ModelsFull("there is no memory for this model beside those that are in use")
        _, backbone = min(idle)
        self.results["evicted"] += 1
        logger.info("backbone %s is unloaded: others need its memory", backbone)
        await asyncio.gather(*(model.unload() for model in users[backbone]))


def _default_of(settings: Settings, configured: Mapping[str, Entry]) -> str:
    return settings.model_name if settings.models is not None and settings.model_name else next(iter(configured))


def default_settings(settings: Settings) -> Settings:
    """Return the settings with those of the default model; raises as `configured_models`."""
    configured = configured_models(settings, log=logging.DEBUG)
    default = _default_of(settings, configured)
    return settings.model_copy(update={**configured[default].settings, "model_name": default or settings.model_name})


def configured_models(settings: Settings, *, log: int = logging.ERROR) -> dict[str, Entry]:
    """Return the models that settings name: of the folder, or one without a name.

    Broken entries are logged at a level.

    Raises:
        SettingsError: there are none, or the default is none of them, or one is broken and that is to end the start.
    """
    if settings.models is None:
        return {"": Entry({}, {})}
    try:
        entries, problems = read_folder(Path(settings.models).expanduser())
    except OSError as error:
        raise SettingsError(f"VIT_MODELS={settings.models!r}: {error.strerror or error}") from None
    for problem in problems:
        logger.log(log, "no model: %s", problem)
    if problems and settings.strict:
        raise SettingsError(f"VIT_MODELS={settings.models!r}: {problems[0]}")
    if not entries:
        raise SettingsError(f"VIT_MODELS={settings.models!r}: there is no model in this folder")
    if settings.model_name not in (None, *entries):
        names = ", ".join(entries)
        raise SettingsError(f"VIT_MODEL_NAME={settings.model_name!r}: expected a model of VIT_MODELS: {names:.1000}")
    return entries
