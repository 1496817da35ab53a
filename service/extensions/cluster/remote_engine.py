"""One generation of a model on the engines of other processes."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.errors import EngineUnavailable
from service.extensions.cluster import frames
from service.extensions.cluster.engine_client import EngineClient


class RemoteEngine:
    """One generation of a model, served by engines of other processes; see `Engine`.

    Each image goes to the engine with the fewest requests of this worker, among the engines that
    have the generation.
    """

    def __init__(self, engines: Sequence[EngineClient], name: str, generation: int) -> None:
        self.engines = engines
        self.info: ModelInfo | None = None
        self._name = name
        self._generation = generation
        self._serving: list[EngineClient] = []
        self._turns = itertools.count()
        self.refresh()

    @property
    def ready(self) -> bool:
        """Return whether an engine has the generation and takes images."""
        return bool(self._serving)

    @property
    def status(self) -> EngineStatus:
        """Return the status of the first serving engine; if none serves, of the first engine."""
        return (self._serving or self.engines)[0].status

    def refresh(self) -> None:
        """Update the serving engines after a change of one engine."""
        name = self._name
        number = self._generation
        ready = [
            engine
            for engine in self.engines
            if number in engine.models.get(name, {}) and engine.status.state == "ready"
        ]
        # Each engine reads its folders itself. If one engine failed to read a checkpoint, the same
        # number may mean different content from then on.
        contents = [engine.models[name][number].content for engine in ready]
        if ready and (self.info is None or self.info.content not in contents):
            self.info = ready[0].models[name][number]
        same = [
            engine
            for engine, content in zip(ready, contents, strict=True)
            if self.info is not None and content == self.info.content
        ]
        # If all engines withdraw the generation, they still answer its last requests.
        self._serving = [
            engine for engine in same if (name, number) not in engine.withdrawn
        ] or same
        infos = [engine.models[name][number] for engine in self._serving]
        if infos:
            self.info = replace(infos[0], device=",".join(info.device for info in infos))

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """See `Engine.infer`."""
        submit = frames.Submit.of(self._name, self._generation, request, timeout)
        result: InferenceResult = await self._least_loaded().ask(submit)
        return result

    async def embed_texts(self, texts: Sequence[str], *, timeout: float) -> NDArray[np.float32]:
        """See `Engine.embed_texts`; all workers ask the same engine, which caches the texts."""
        engine = self._serving[0] if self._serving else self._least_loaded()
        request = frames.EmbedTexts(self._name, self._generation, tuple(texts), timeout)
        features: NDArray[np.float32] = await engine.ask(request)
        return features

    def _least_loaded(self) -> EngineClient:
        """Return the engine with the fewest requests; equal engines take turns."""
        if not self._serving:
            raise EngineUnavailable(self.status.reason or "no engine has this model any more")
        first = next(self._turns) % len(self._serving)
        in_turn = self._serving[first:] + self._serving[:first]
        return min(in_turn, key=lambda engine: len(engine.pending))
