"""The protocols of an engine, which the web side calls, and of the model runner, which an engine
calls.
"""

from collections.abc import MutableMapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from model.outputs import Outputs, RequestedOutputs
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult, ModelInfo


class ModelRunner(Protocol):
    """The part of `model.runtime.predictor.Predictor` that an engine needs; an engine itself
    imports no torch.

    Attributes:
        max_batch: images in one batch at most.
        streams: threads that may be inside `predict` at the same time, beside the thread of maps.
        size: bytes that it takes, once it is warm.
    """

    max_batch: int
    streams: int
    size: int

    @property
    def heads(self) -> MutableMapping[str, Any]:
        """Return the heads of the models that share it, by name."""

    @property
    def batch_sizes(self) -> tuple[int, ...] | None:
        """Return the fixed launch sizes; None when any size up to `max_batch` is launched."""

    @property
    def compiled(self) -> str:
        """Return `compiled`, `compiling`, or why not."""

    @property
    def device(self) -> str:
        """Return the device's name, `cpu` or `cuda:N`."""

    def warm_up(self, *, compile_later: bool = False) -> None:
        """Run the model once before the first request; raises `DeviceError` when it does not run."""

    def finish_warm_up(self) -> None:
        """Compile beside the batches what `warm_up` has left for later; raises as `warm_up`."""

    def check(self) -> None:
        """Run the smallest batch; raises `DeviceError` when the device no longer computes."""

    def defers(self, requested: RequestedOutputs) -> bool:
        """Return whether `predict` of an image would first load something, for a second or two."""

    def launch_size(self, count: int) -> int:
        """Return the number of rows launched for a batch of `count` images."""

    def predict(
        self, images: Sequence[NDArray[np.uint8]], requests: Sequence[RequestedOutputs]
    ) -> Sequence[Outputs]:
        """Return the requested outputs of each image, see
        `model.runtime.predictor.Predictor.predict`.
        """

    def embed_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the features of texts, float32 [N, D]; for models with a text tower. One thread
        calls it.
        """


class Device(Protocol):
    """One device on which an engine computes."""

    @property
    def info(self) -> ModelInfo | None:
        """Return the description of the model, or None before it is loaded."""

    @property
    def status(self) -> EngineStatus:
        """Return the current status."""


class Engine(Device, Protocol):
    """The interface of an engine, which computes images for the web side."""

    @property
    def engines(self) -> Sequence[Device]:
        """Return the engines that compute, one a device."""

    @property
    def ready(self) -> bool:
        """Return whether `status` says "ready"; cheap enough for each request."""

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """Return the result of one image, which must be launched within `timeout` seconds from now.

        Cancelling the call takes the image out of the queue if it was not launched.

        Raises:
            DeadlineExceeded: it was not launched in time.
            InferenceFailed: the model gave no answer for this image.
            EngineUnavailable: no model is ready.
            QueueFull: too many images wait.
        """

    async def embed_texts(self, texts: Sequence[str], *, timeout: float) -> NDArray[np.float32]:
        """Return the features of texts, float32 [N, D], which must be there within `timeout`
        seconds.

        Only an engine whose `info.zero_shot` is there has a text tower.

        Raises:
            DeadlineExceeded, InferenceFailed, EngineUnavailable, QueueFull: as `infer`.
        """
