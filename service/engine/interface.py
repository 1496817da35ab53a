"""The protocols of an engine, for web code, and of a model runner, for an engine."""

from collections.abc import MutableMapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from model.outputs import Outputs, RequestedOutputs
from service.engine.messages import EngineStatus, InferenceRequest, InferenceResult, ModelInfo


class ModelRunner(Protocol):
    """The part of `model.runtime.predictor.Predictor` that an engine needs.

    An engine imports no torch.

    Attributes:
        max_batch: largest number of images in one batch.
        streams: number of threads that may call `predict` at once, besides the thread of maps.
        size: bytes that the warm model takes.
    """

    max_batch: int
    streams: int
    size: int

    @property
    def heads(self) -> MutableMapping[str, Any]:
        """Return by name the heads of the models that share the runner."""

    @property
    def batch_sizes(self) -> tuple[int, ...] | None:
        """Return the fixed launch sizes; None if any size up to `max_batch` is launched."""

    @property
    def compiled(self) -> str:
        """Return `compiled`, `compiling`, or the reason why the model is not compiled."""

    @property
    def device(self) -> str:
        """Return the device's name, `cpu` or `cuda:N`."""

    def warm_up(self, *, compile_later: bool = False) -> None:
        """Run the model once before the first request; raises `DeviceError` if it does not run."""

    def finish_warm_up(self) -> None:
        """Compile what `warm_up` left for later, while batches run; raises as `warm_up`."""

    def check(self) -> None:
        """Run the smallest batch; raises `DeviceError` if the device no longer computes."""

    def defers(self, requested: RequestedOutputs) -> bool:
        """Return whether `predict` would first load something, which takes a second or two."""

    def launch_size(self, count: int) -> int:
        """Return the number of rows launched for a batch of `count` images."""

    def predict(
        self, images: Sequence[NDArray[np.uint8]], requests: Sequence[RequestedOutputs]
    ) -> Sequence[Outputs]:
        """Return the outputs of each image; see `model.runtime.predictor.Predictor.predict`."""

    def embed_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the features of texts, float32 [N, D]; only for models with a text tower.

        Only one thread calls it.
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
    """The interface of an engine, which computes images for web code."""

    @property
    def engines(self) -> Sequence[Device]:
        """Return the engines that compute, one for each device."""

    @property
    def ready(self) -> bool:
        """Return whether `status` is "ready"; cheap enough for every request."""

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        """Return the result of one image, which must be launched within `timeout` seconds.

        If the call is cancelled before the launch, the image leaves the queue.

        Raises:
            DeadlineExceeded: the image was not launched in time.
            InferenceFailed: the model did not answer for this image.
            EngineUnavailable: the model is not ready.
            QueueFull: too many images wait.
        """

    async def embed_texts(self, texts: Sequence[str], *, timeout: float) -> NDArray[np.float32]:
        """Return the features of texts, float32 [N, D], within `timeout` seconds.

        Only an engine with `info.zero_shot` has a text tower.

        Raises:
            DeadlineExceeded, InferenceFailed, EngineUnavailable, QueueFull: as `infer`.
        """
