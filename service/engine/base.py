"""Who computes: the protocol of an engine, and of the model runner that an engine calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from model.prediction import BatchPrediction, MapRequest
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult, ModelInfo


class ModelRunner(Protocol):
    """What an engine needs of `model.runtime.predictor.Predictor`; an engine itself imports no torch."""

    max_batch: int
    streams: int
    """Threads that may be inside `predict` at the same time."""

    @property
    def batch_sizes(self) -> tuple[int, ...] | None:
        """The only sizes launched; None when any up to `max_batch` is."""
        ...

    @property
    def compiled(self) -> str:
        """`compiled`, `compiling`, or why not."""
        ...

    @property
    def device(self) -> str:
        """`cpu` or `cuda:N`."""
        ...

    def warm_up(self) -> None:
        """Run once before the first request."""
        ...

    def check(self) -> None:
        """Run the smallest batch; raises `DeviceError` when the device no longer computes."""
        ...

    def launch_size(self, count: int) -> int:
        """Images launched for a batch of `count`."""
        ...

    def predict(
        self, images: NDArray[np.uint8], *, top_k: int, maps: Sequence[MapRequest | None] = ()
    ) -> BatchPrediction:
        """See `model.runtime.predictor.Predictor.predict`."""
        ...


class Engine(Protocol):
    """Computes images; the web side knows no more of it."""

    @property
    def info(self) -> ModelInfo | None:
        """What it serves, once it is loaded."""
        ...

    @property
    def status(self) -> EngineStatus:
        """How it is doing right now."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it takes images: `status` says "ready", for those who only ask that, with each request."""
        ...

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin loading; `on_change` is called on the event loop whenever the state changes."""
        ...

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """One image's answer.

        Cancelling the call takes the image out of the queue if it was not launched.

        Args:
            request: the image.
            timeout: seconds from now within which it must be launched.

        Raises:
            DeadlineExceeded: it was not launched in time.
            InferenceFailed: the model gave no answer for this image.
            EngineUnavailable: no model is ready.
            QueueFull: too many images wait.
        """
        ...

    async def close(self) -> None:
        """Finish what is launched, refuse the rest."""
        ...


def replicas(engine: Engine) -> Sequence[Engine]:
    """The engines that compute: itself, or those of a group, one a device."""
    group: Sequence[Engine] = getattr(engine, "engines", (engine,))
    return group
