"""The messages between web code and engines: frozen, typed, free of torch and of HTTP.

Only intervals cross from the engine to the web side, never clock readings: two processes need not
share a clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig, PreprocessConfig
from model.heads import SOFTMAX, Form, ZeroShot
from model.outputs import Outputs, Pooling, RequestedOutputs

# Why a batch was launched: enough images waited, the device was idle, or the oldest image had
# waited long enough.
Release = Literal["full", "idle", "delay"]

# The state of an engine; it takes images only when it is ready.
EngineState = Literal["loading", "ready", "failed", "closed"]


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One image to be computed.

    Attributes:
        pixels: uint8 [H, W, C], the model's input size.
        requested: the outputs to compute.
    """

    pixels: NDArray[np.uint8]
    requested: RequestedOutputs


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """The model's answer for one image.

    Attributes:
        outputs: the requested outputs.
        batch_size: images that were launched together.
        queue_seconds: from entering the queue to launch.
        inference_seconds: from launch to result, of the whole batch.
    """

    outputs: Outputs
    batch_size: int
    queue_seconds: float
    inference_seconds: float


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The report of one launched batch, for metrics.

    Attributes:
        size: images in it.
        padding: rows added to reach a fixed launch size.
    """

    device: str
    size: int
    padding: int
    release: Release


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The loaded model; each field is an attribute of that name of the checkpoint or of the model
    runner.

    Attributes:
        loaded_at: date of the load, in seconds since 1970.
        backbone: the same for models that share one.
        head: its name among the heads of the backbone; see `RequestedOutputs.head`.
        taught: whether it is a taught head, which abstains from pictures far from its examples.
        has_thresholds: whether its classes have least scores; see `Outputs.least`.
        features: which embedding its head reads.
    """

    name: str
    source: str
    revision: str | None
    format: str
    architecture: str
    parameters: int
    config: NetworkConfig
    preprocess: PreprocessConfig
    labels: tuple[str, ...]
    temperature: float
    multi_label: bool
    device: str
    dtype: str
    backend: str
    max_batch: int
    gpu_uuid: str | None
    content: str = ""
    form: Form = SOFTMAX
    loaded_at: int = 0
    assumed: tuple[str, ...] = ()
    zero_shot: ZeroShot | None = None
    coverage: float | None = None
    calibrated_on: int | None = None
    backbone: str = ""
    head: str = ""
    taught: bool = False
    has_thresholds: bool = False
    features: Pooling = "head"

    @property
    def can_abstain(self) -> bool:
        """Return whether its head may say of a picture that none of its labels fits."""
        return self.taught or self.coverage is not None or self.has_thresholds

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Return (rows, columns, channels) of the images that the model takes."""
        return (*self.preprocess.size, len(self.preprocess.mean))


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The status of an engine.

    Attributes:
        device: on which it runs; until it is loaded, as the settings name it.
        reason: why it is not ready, or computes no batch to its end though it is; else empty.
        compiled: `compiled`, `compiling`, or why not.
        batch_sizes: fixed launch sizes, None when any size is launched.
        queue_depth: images waiting.
        restarts: how often it was started again after a failure.
    """

    device: str
    state: EngineState
    reason: str
    compiled: str
    batch_sizes: tuple[int, ...] | None
    queue_depth: int
    restarts: int = 0


def attributes(names: Iterable[str], *sources: object) -> dict[str, Any]:
    """Read each name off the first source that has it; names that no source has are left out."""
    return {
        name: getattr(source, name)
        for source in reversed(sources)
        for name in names
        if hasattr(source, name)
    }
