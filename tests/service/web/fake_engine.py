"""An engine without a thread, for tests of the web side."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from model.heads import Head
from model.outputs import AttentionMap, EmbeddingRequest, Outputs
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from tests.service.fakes import (
    CLASSES,
    answer,
    expected_embedding,
    expected_indices,
    expected_logits,
    model_info,
    text_feature,
)


class FakeEngine:
    """An engine that answers by red value, or with `error`; every call waits for `gate`."""

    size = 0
    last_used: float | None = None

    def __init__(self, info: ModelInfo | None = None) -> None:
        self.info: ModelInfo | None = info or model_info()
        self.state = "ready"
        self.reason = ""
        self.error: Exception | None = None
        self.thresholds: NDArray[np.float32] | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0
        self.cancelled = 0
        self.timeouts: list[float] = []

    @property
    def engines(self) -> Sequence[Self]:
        return (self,)

    @property
    def status(self) -> EngineStatus:
        return EngineStatus("cpu", self.state, self.reason, "off", None, self.waiting)  # type: ignore[arg-type]

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def start(self, on_change: Callable[[], None]) -> None:
        on_change()

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        self.timeouts.append(timeout)
        self.waiting += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        if self.error is not None:
            raise self.error
        red = int(np.asarray(request.pixels)[0, 0, 0])
        requested = request.requested
        scores, indices = answer(red, requested.top_k)
        if self.info is not None and self.info.config.num_classes:
            indices %= self.info.config.num_classes
        found = None
        if requested.map is not None:
            values = np.array([[0.1, 0.2], [0.3, 0.4]], np.float32)
            wanted = requested.map
            best = int(indices[0]) if wanted.class_index is None else wanted.class_index
            if wanted.classifier is not None:
                head = Head(
                    (),
                    independent=False,
                    weight=wanted.classifier.weight,
                    bias=wanted.classifier.bias,
                    normalized=wanted.classifier.normalized,
                )
                features = expected_embedding(red, EmbeddingRequest())
                best, _ = head.map_target(features, wanted.method, wanted.class_index)
            of_class = best if wanted.is_class_specific else None
            facts = (None, None) if of_class is None else (0.5, 0.25)
            found = AttentionMap(
                replace(wanted, class_index=of_class, classifier=None), values, 0.9, *facts
            )
        logits = expected_logits(red) if requested.logits else None
        embedding = (
            None if requested.embedding is None else expected_embedding(red, requested.embedding)
        )
        label_set = np.array(expected_indices(red, red % CLASSES)) if requested.label_set else None
        thresholds = None if self.thresholds is None else self.thresholds[indices]
        predicted_score = None
        if thresholds is not None:
            predicted_score = float(np.where(scores >= thresholds, scores, -1).max())
        others = [
            await self.infer(replace(request, requested=each), timeout=timeout)
            for each in requested.more
        ]
        more = tuple(each.outputs for each in others)
        outputs = Outputs(
            scores,
            indices,
            found,
            logits,
            embedding,
            label_set=label_set,
            thresholds=thresholds,
            predicted_score=predicted_score,
            more=more,
        )
        return InferenceResult(outputs, 1, 0.001, 0.002)

    async def embed_texts(self, texts: Sequence[str], *, timeout: float) -> NDArray[np.float32]:
        self.timeouts.append(timeout)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return np.stack([text_feature(text) for text in texts])

    async def close(self) -> None:
        self.state = "closed"
