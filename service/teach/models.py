"""Taught heads as models among the others: whoever asks for a model by its name need not know which one is taught.

TaughtModels            all models of a service, and beside them one for each taught head
    TaughtModel         a name; its state follows that of the model with its backbone
        TaughtEngine    asks that model's engine for features, and scores them by the head, in this process
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from model.config import PreprocessConfig
from model.heads import Head, compared, of_image, with_labels, with_map
from model.outputs import CLASS_SPECIFIC, EmbeddingRequest, MapRequest, Outputs, RequestedOutputs
from service.engine.backbones import What
from service.engine.base import Engine
from service.engine.messages import EngineState, EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.errors import EngineUnavailable, Forbidden, HeadWithoutBackbone, NameTaken
from service.models.model import Generation, Loads, ModelState, ServedModel
from service.models.models import Models
from service.teach.examples import HeadRow
from service.teach.heads import Taught, TaughtHeads

_KEY: Final = "taught/"
"""What a head's key among those of its backbone begins with; no model's name has a slash."""


def features_of(info: ModelInfo) -> str:
    """Return what names the features that a model gives of a picture: its backbone, and how pictures become pixels.

    The dtype is no part of it: it changes features by their rounding alone.
    """
    return feature_name(info.backbone, info.preprocess)


@lru_cache
def feature_name(backbone: str, preprocess: PreprocessConfig) -> str:
    """Return the name of the features of a backbone, as `model.checkpoint.backbone` or an engine names that."""
    digest = hashlib.sha256(preprocess.model_dump_json().encode()).hexdigest()
    return f"{backbone.partition('-')[0]}-{digest[:8]}"


class _Base(NamedTuple):
    """The model whose features a head reads: its key, itself, and the version of it that answers now."""

    key: str
    model: ServedModel
    current: Generation[Engine]


class TaughtModels(Models):
    """All models of a service: those that are `loaded`, and one for each taught head.

    Args:
        loaded: started and closed with these.
        heads: watched from the start to the end.
    """

    def __init__(self, loaded: Models, heads: TaughtHeads) -> None:
        super().__init__(loaded.served, loaded.default_name)
        self.loaded, self.heads = loaded, heads
        self.results = loaded.results
        self._fitted: dict[str, Head] = {}
        heads.on_change = self._renew

    def base(self, backbone: str, name: str) -> _Base | None:
        """Return the model that gives these features; of several the one of this name, if it is among them."""
        served = self.loaded.served.items()
        found = [key for key, model in served if model.info is not None and features_of(model.info) == backbone]
        key = min(found, key=lambda key: self.loaded.name_of(key) != name, default=None)
        return None if key is None else _Base(key, self.loaded.served[key], self.loaded.served[key].current)

    def require_base(self, head: HeadRow) -> str:
        """Return the name of the model with a head's backbone; raises `HeadWithoutBackbone` if there is none now."""
        base = self.base(head.backbone, head.model)
        if base is None:
            raise HeadWithoutBackbone(f"{head.name}: {_without_backbone(head)}")
        return self.loaded.name_of(base.key)

    def require_free(self, name: str) -> None:
        """Raise `NameTaken` if a loaded model has this name."""
        if name in map(self.loaded.name_of, self.loaded.served):
            raise NameTaken(f"{name}: a model has this name: choose another one for the head")

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading, and watch the heads; see `Models.start`."""

        def changed() -> None:
            self._renew()
            on_change()

        self.on_change = on_change
        self._watcher = asyncio.create_task(self.heads.watch())
        self.loaded.start(changed)

    async def close(self) -> None:
        """Close all models, and look at the heads no more."""
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        await self.loaded.close()

    def backbones(self) -> dict[str, int]:
        """Return the bytes of each backbone that is loaded."""
        return self.loaded.backbones()

    def statuses(self) -> list[EngineStatus]:
        """Return those of all engines that compute."""
        return self.loaded.statuses()

    def tally(self) -> Mapping[str, int]:
        """Return how many loads ended how."""
        return self.loaded.tally()

    async def available(self, name: str | None) -> None:
        """Return when a model answers, a head's when that of its backbone does; see `Models.available`."""
        model = self.find(name)
        if isinstance(model, TaughtModel):
            if model.base is None or model.taught.fitted is None:
                raise EngineUnavailable(f"{name}: {model.current.engine.status.reason}")
            name = model.base.key
        await self.loaded.available(name)

    async def put(self, name: str, what: What) -> bool:
        """Load or replace a model; see `Models.put`. Raises `NameTaken` if a head has the name."""
        if name in self.heads.heads:
            raise NameTaken(f"{name}: a taught head has this name: choose another one for the model")
        return await self.loaded.put(name, what)

    async def unload(self, name: str) -> None:
        """Give a model's memory back; see `Models.unload`."""
        self._require_loaded(name)
        await self.loaded.unload(name)

    async def delete(self, name: str) -> None:
        """Remove a model; see `Models.delete`."""
        self._require_loaded(name)
        await self.loaded.delete(name)

    def reload(self) -> None:
        """Begin to load what is configured as it is now."""
        self.loaded.reload()

    def _require_loaded(self, name: str) -> None:
        if isinstance(self.find(name), TaughtModel):
            raise Forbidden(f"{name}: it is a taught head: DELETE /heads/{name} removes it")

    def _renew(self) -> None:
        """Take the heads and the models as they are now; a head that is as it was stays the same object."""
        named = set(map(self.loaded.name_of, self.loaded.served))
        served: dict[str, ServedModel] = dict(self.loaded.served)
        self._fitted.clear()
        is_loading = any(model.state == "loading" for model in served.values())
        for name, taught in self.heads.heads.items():
            if name in named:
                continue
            base, before = self.base(taught.row.backbone, taught.row.model), self.served.get(name)
            state: ModelState = "loading" if base is None and is_loading else "failed"
            if taught.fitted is not None:
                self._fitted[_KEY + name] = taught.fitted.head
            if not (isinstance(before, TaughtModel) and before.made_of == (taught, base, state)):
                before = TaughtModel(taught, base, state, self._fitted)
            served[name] = before
        self.served = served


def _without_backbone(head: HeadRow) -> str:
    return f"no model is served with the backbone of {head.model}, as it was when the head was begun"


class TaughtModel(ServedModel):
    """The name of a head.

    Args:
        taught: the head.
        base: the model whose features it reads; None: none that is loaded gives them, and its state is `without`.
        fitted: all heads by their keys.
    """

    def __init__(self, taught: Taught, base: _Base | None, without: ModelState, fitted: Mapping[str, Head]) -> None:
        super().__init__()
        self.taught, self.base, self.made_of = taught, base, (taught, base, without)
        self.current = _TaughtGeneration(TaughtEngine(taught, base, without, fitted), base)

    is_taught = True

    @property
    def state(self) -> ModelState:
        """Return whether it serves, or what it or the model with its backbone does instead."""
        if self.base is not None and self.taught.fitted is not None:
            return self.base.model.state
        return "failed" if self.current.engine.status.state == "failed" else "loading"

    @property
    def loads(self) -> Loads:
        """Return none: a head is not loaded."""
        return Loads()

    def start(self, on_change: Callable[[], None]) -> None:
        """Do nothing: the model with its backbone is started."""

    async def replace(self, checkpoint: What) -> None:
        """Raise `Forbidden`."""
        raise Forbidden(f"{self.taught.row.name}: a taught head is no checkpoint")

    async def close(self) -> None:
        """Do nothing: the model with its backbone is closed."""


class _TaughtGeneration(Generation["TaughtEngine"]):
    def __init__(self, engine: TaughtEngine, base: _Base | None) -> None:
        super().__init__(engine)
        self._base = base

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keep the version of the model with the backbone, too, until the context ends."""
        assert self._base is not None, "without one the head answers nothing"
        with self._base.current.request(), super().request():
            yield


class TaughtEngine:
    """The engine of a head; see `service.engine.base.Engine`.

    A request may ask several heads of the backbone, see `RequestedOutputs.more`, if the first of them is a taught one.
    """

    def __init__(self, taught: Taught, base: _Base | None, without: ModelState, fitted: Mapping[str, Head]) -> None:
        self._taught, self._without, self._fitted = taught, without, fitted
        self._base = None if base is None else base.current.engine

    @property
    def info(self) -> ModelInfo | None:
        """Return the description of the model with the backbone, with the head's name and labels."""
        info = None if self._base is None else self._base.info
        if info is None or self._taught.fitted is None:
            return None
        head, name = self._taught.fitted.head, self._taught.row.name
        return replace(
            info,
            name=name,
            head=_KEY + name,
            config=with_labels(info.config, head.labels),
            labels=head.labels,
            temperature=head.temperature,
            multi_label=False,
            zero_shot=None,
            coverage=None,
            calibrated_on=None,
        )

    @property
    def engines(self) -> tuple[Self]:
        """Return this engine."""
        return (self,)

    @property
    def ready(self) -> bool:
        """Return whether the head answers."""
        return self._base is not None and self._base.ready and self._taught.fitted is not None

    @property
    def status(self) -> EngineStatus:
        """Return the status of what computes, or why nothing does."""
        row = self._taught.row
        if self._base is None:
            state: EngineState = "failed" if self._without == "failed" else "loading"
            return EngineStatus("", state, _without_backbone(row), "", None, 0)
        if self._taught.fitted is None:
            return replace(self._base.status, state="loading", reason=row.reason or "it is being fitted")
        return self._base.status

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """Return the result of one image; see `Engine.infer`."""
        assert self._base is not None
        assert self._base.info is not None
        ends, own = time.monotonic() + timeout, self._base.info.head
        wanted = request.requested.each
        first, *more = (self._of_backbone(each, own) for each in wanted)
        asked = replace(request, requested=replace(first, more=tuple(more)))
        result = await self._base.infer(asked, timeout=timeout)
        found: list[Outputs] = []
        for each, outputs in zip(wanted, (result.outputs, *result.outputs.more), strict=True):
            head = self._head(each)
            if head is None:
                found.append(outputs)
                continue
            answer, logits = compared(outputs, head, each)
            if each.map is not None and each.map.method in CLASS_SPECIFIC:
                label = int(answer.indices[0]) if each.map.class_index is None else each.map.class_index
                of_class = MapRequest(each.map.method, direction=head.target(each.map.method, logits, label))
                passed = replace(request, requested=RequestedOutputs(1, of_class, head=own))
                explained = await self._base.infer(passed, timeout=ends - time.monotonic())
                assert explained.outputs.map is not None, "the engine answers each request for a map"
                answer = with_map(answer, head, logits, each.map, explained.outputs.map)
                result = result.after(explained)
            found.append(answer)
        return replace(result, outputs=replace(found[0], more=tuple(found[1:])))

    async def embed_texts(self, texts: Sequence[str], *, timeout: float) -> NDArray[np.float32]:
        """Raise `EngineUnavailable`: a head of its own labels takes none of a request."""
        raise EngineUnavailable("a taught head has labels of its own")

    def _head(self, wanted: RequestedOutputs) -> Head | None:
        """Return the taught head that scores an image; None where another one does, or features alone are asked for."""
        if wanted.embedding not in (None, EmbeddingRequest()):
            return None
        own = self._taught.fitted
        return own.head if own and wanted.head == _KEY + self._taught.row.name else self._fitted.get(wanted.head)

    def _of_backbone(self, wanted: RequestedOutputs, own: str) -> RequestedOutputs:
        """Return what the engine of the backbone is asked for; `own` is the head of its model."""
        asked = replace(wanted, more=())
        if self._head(wanted) is not None:
            is_of_class = wanted.map is not None and wanted.map.method in CLASS_SPECIFIC
            asked = of_image(replace(asked, map=None) if is_of_class else asked)
        return replace(asked, head=own) if wanted.head.startswith(_KEY) else asked
