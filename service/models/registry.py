"""All models of a service by name: how they are found, listed and described.

`LocalModels` has the models of this process, and `service.extensions.cluster.remote_model` the
models of other processes. The folder of models is the truth: a load or deletion over HTTP lasts
until the folder is read again.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from service.background import Tasks
from service.engine.backbones import Checkpoint
from service.engine.messages import EngineStatus
from service.errors import (
    DefaultModel,
    EngineUnavailable,
    Forbidden,
    ModelFailed,
    ServiceError,
    SettingsError,
    UnknownModel,
)
from service.models.lease import Lease
from service.models.served_heads import ServedHead
from service.models.served_model import ServedModel
from vitserve.documents import ListedModel

logger = logging.getLogger("vitserve")

SWAP_UNDER_WAY: Final = "another checkpoint is being loaded: try again when that is done"

_FITTING: Final = "it is being fitted"
_UNLOADED: Final = "its memory was given back"


class Models(ABC):
    """Models by name, one of which is the default.

    A key of `served` is a model's name. The key of a single checkpoint is empty, because its name
    is known only when it is loaded.

    Args:
        served: models by key.
        default: key of the model that requests without a name ask.

    Attributes:
        heads: heads that are answered like models, under names that no model has.
        results: number of loads by result, of swaps that were `served` or `refused`, and of
            backbones that were `evicted`.
        refused: keys of models whose last swap was refused.
        on_change: called on the event loop when the state of a model changes.
    """

    heads: Mapping[str, ServedHead] = MappingProxyType({})

    def __init__(self, served: Mapping[str, ServedModel], default: str = "") -> None:
        self.served = dict(served)
        self.default_name = default
        self.results: Mapping[str, int] = {}
        self.refused: set[str] = set()
        self.on_change: Callable[[], None] = lambda: None
        self._tasks = Tasks()
        self._reload_again = False
        self._reloading: asyncio.Task[None] | None = None

    # Names

    @property
    def default(self) -> ServedModel:
        """Return the default model."""
        return self.served[self.default_name]

    def name_of(self, key: str) -> str:
        """Return the name of a model as answers have it."""
        info = self.served[key].info
        return key or (info.name if info is not None else "")

    def names(self) -> list[str]:
        """Return the names of all models and heads, sorted."""
        return sorted([*map(self.name_of, self.served), *self.heads])

    def key(self, name: str | None, *, is_new: bool = False) -> str:
        """Return the key of a model; None is the default's name.

        A head has the key of the model whose features it scores.

        Args:
            name: name of a model or head.
            is_new: whether a new model may get this name, which is then its key.

        Raises:
            UnknownModel: no model or head has this name, and it may not be new.
            EngineUnavailable: the head is being fitted, or its model may be loading.
            `ServedHead.refusal`: the head does not answer.
        """
        if name is None:
            return self.default_name
        if name in self.heads:
            return self._key_of_head(self.heads[name])
        if name in self.served and name:
            return name
        if name and name == self.name_of(self.default_name):
            return self.default_name
        if is_new:
            return name
        available = ", ".join(self.names())
        raise UnknownModel(f"unknown model {name!r:.200}; available: {available:.2000}")

    def acquire(self, name: str | None) -> Lease:
        """Hold the current version of a model, which `load` has described, until its release.

        Raises:
            The errors of `key`, and of `require_ready` unless `load` can load the model.
        """
        key = self.key(name)
        model = self.served[key]
        info = model.info
        if model.state != "unloaded" or info is None:
            self.require_ready(key)
        assert info is not None, "a ready model is described"
        version = model.current
        version.begin()
        served_head = self.heads.get(name or "")
        is_ready = version.engine.ready
        if served_head is None:
            return Lease(self, version, info, is_loaded=is_ready)
        return Lease(self, version, served_head.info(info), served_head.head, is_ready)

    def needs_load(self, name: str | None) -> bool:
        """Return whether `acquire` needs `load` first, which describes the model.

        The default model is not loaded for a request, because the service is not ready without it.
        """
        model = self.served[self.key(name)]
        is_loadable = model.state == "loading" or (model.state == "unloaded" and model.info is None)
        return is_loadable and model is not self.default

    def require_ready(self, key: str) -> None:
        """Raise an error if a model does not answer now.

        Raises:
            ModelFailed: the model could not be loaded. A failed default model is a failure of the
                service instead.
            EngineUnavailable: the model is not ready for another reason.
        """
        model = self.served[key]
        engine = model.current.engine
        if engine.ready and engine.info is not None:
            return
        reason = self.status_of(key).reason or engine.status.reason
        if model is not self.default and key:
            reason = f"{key}: {reason}"
            if model.state == "failed" and self.default.current.engine.ready:
                raise ModelFailed(reason)
        raise EngineUnavailable(reason)

    def _key_of_head(self, served_head: ServedHead) -> str:
        if served_head.key is not None and served_head.head is not None:
            return served_head.key
        message = f"{served_head.name}: {served_head.reason or _FITTING}"
        if self._is_pending(served_head):
            raise EngineUnavailable(message)
        raise served_head.refusal(message)

    def _is_pending(self, served_head: ServedHead) -> bool:
        """Return whether a head is being fitted, or its model may be one that is loading."""
        if served_head.key is None:
            return any(model.state == "loading" for model in self.served.values())
        return not served_head.reason

    def _require_changeable(self, name: str) -> None:
        if name in self.heads:
            raise Forbidden(f"{name}: it is a head, not a model: {self.heads[name].removal}")
        if self.key(name) == self.default_name:
            raise DefaultModel(
                f"{name!r:.200} is the default model: put another checkpoint in its place"
            )

    # Descriptions

    def describe(self) -> list[ListedModel]:
        """Return the status of each model and head, sorted by name."""
        models = map(self.status_of, self.served)
        heads = map(self._status_of_head, self.heads.values())
        return sorted([*models, *heads], key=lambda status: status.name)

    def status_of(self, key: str) -> ListedModel:
        """Return the status of a model."""
        model = self.served[key]
        engine = model.current.engine
        info = model.info
        last_used: float | None = getattr(model, "last_used", None)
        if last_used is not None:
            last_used = round(time.monotonic() - last_used, 3)
        size = 0
        reason = ""
        if model.state == "ready":
            size = getattr(engine, "size", 0)
        elif model.current.state == "unloaded":
            reason = _UNLOADED
        else:
            reason = engine.status.reason
        return ListedModel(
            name=self.name_of(key),
            state=model.state,
            reason=reason,
            backbone="" if info is None else info.backbone,
            classes=None if info is None else info.config.num_classes,
            bytes=size,
            last_used_seconds=last_used,
            default=key == self.default_name,
            taught=False,
        )

    def backbones(self) -> dict[str, int]:
        """Return the bytes of each loaded backbone."""
        return {
            status.backbone: status.bytes
            for status in map(self.status_of, self.served)
            if status.state == "ready" and status.backbone
        }

    def reloads(self) -> dict[str, bool]:
        """Return by name whether the last swap of each model was served; true without a swap."""
        return {self.name_of(key): key not in self.refused for key in self.served}

    def statuses(self) -> list[EngineStatus]:
        """Return the status of each engine that computes, the default's first."""
        others = [
            model
            for model in self.served.values()
            if model is not self.default and model.state == "ready"
        ]
        engines = (model.current.engine for model in (self.default, *others))
        # Models may share an engine.
        statuses = {id(getattr(engine, "backbone", engine)): engine.status for engine in engines}
        return list(statuses.values())

    def _status_of_head(self, served_head: ServedHead) -> ListedModel:
        if served_head.key is not None and served_head.head is not None:
            differences = {
                "name": served_head.name,
                "classes": len(served_head.head.labels),
                "bytes": 0,
                "default": False,
                "taught": True,
            }
            return self.status_of(served_head.key).model_copy(update=differences)
        return ListedModel(
            name=served_head.name,
            state="loading" if self._is_pending(served_head) else "failed",
            reason=served_head.reason or _FITTING,
            backbone="",
            bytes=0,
            default=False,
            taught=True,
        )

    # Changes

    @abstractmethod
    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading; `on_change` is called on the event loop when a model's state changes."""

    @abstractmethod
    async def close(self) -> None:
        """Close all models."""

    @abstractmethod
    async def load(self, name: str | None, caller: str = "") -> None:
        """Wait until the current version of a model answers, and load it if it is unloaded.

        Args:
            name: name of the model; None for the default.
            caller: the client that is charged for the load; empty for the operator.

        Raises:
            ModelsFull: the memory for models is full.
            What `require_ready` raises.
        """

    @abstractmethod
    async def put(self, name: str, checkpoint: Checkpoint) -> bool:
        """Load a model, or replace the one of that name; return whether the name is new.

        Raises:
            CheckpointRefused: it cannot be served; the served version stays.
            SwapUnderWay: another checkpoint is being loaded.
            EngineUnavailable: no model is ready yet.
            ModelsFull: the memory for models is full.
            NameTaken: another model has the name of the checkpoint.
            Forbidden: models cannot be changed here.
        """

    @abstractmethod
    async def unload(self, name: str) -> None:
        """Give a model's memory back until a request asks for it.

        Raises:
            DefaultModel, Forbidden, UnknownModel: the model cannot be unloaded.
        """

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Remove a model once its requests are answered; raises as `unload`."""

    def reload(self) -> None:
        """Reconcile the served models with the configuration, in the background.

        It happens after the load under way, and the log has the result.
        """
        # A load under way may have read a file before that was replaced.
        self._reload_again = True
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
        """Reconcile the served models with the configuration, once."""
