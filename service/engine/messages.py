"""The messages between web code and engines: frozen and typed, without torch or HTTP.

Only intervals go from the engine to web code, never clock readings, because two processes may have
different clocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig, PreprocessConfig
from model.heads import SOFTMAX, Form, ZeroShot
from model.outputs import Outputs, Pooling, RequestedOutputs

# Why a batch was launched: it was full, the device was idle, or the oldest image's delay was over.
Release = Literal["full", "idle", "delay"]

# The state of an engine, which takes images only when it is ready.
EngineState = Literal["loading", "ready", "failed", "closed"]


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One image for the model.

    Attributes:
        pixels: uint8 [H, W, C], the model's input size.
        requested: outputs to compute.
    """

    pixels: NDArray[np.uint8]
    requested: RequestedOutputs


class InferenceResult(NamedTuple):
    """The model's answer for one image.

    Attributes:
        outputs: requested outputs.
        batch_size: number of images in the batch.
        queue_seconds: time from entering the queue to the launch.
        inference_seconds: time from the launch to the result of the whole batch.
    """

    outputs: Outputs
    batch_size: int
    queue_seconds: float
    inference_seconds: float


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The report of one launched batch, for metrics.

    Attributes:
        size: number of images.
        padding: number of rows added to reach a fixed launch size.
    """

    device: str
    size: int
    padding: int
    release: Release


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The description of a loaded model.

    Most fields are attributes of the same name of the checkpoint or of the model runner.
    `service.engine.loading` sets the others.

    Attributes:
        loaded_at: date of the load, in seconds since 1970.
        backbone: name of the backbone; equal for models that share it.
        head: name among the heads of the backbone; see `RequestedOutputs.head_name`.
        is_served_head: whether it is a served head, which abstains from pictures far from its
            examples.
        has_thresholds: whether its classes have thresholds; see `Outputs.thresholds`.
        features: embedding that its head reads.
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
    is_served_head: bool = False
    has_thresholds: bool = False
    features: Pooling = "head"

    @property
    def can_abstain(self) -> bool:
        """Return whether the head may answer that none of its labels fits a picture."""
        return self.is_served_head or self.coverage is not None or self.has_thresholds

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Return (rows, columns, channels) of the images that the model takes."""
        return (*self.preprocess.size, len(self.preprocess.mean))


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The status of an engine.

    Attributes:
        device: name of the device; before the load, the name in the settings.
        reason: why the engine is not ready, or a warning that a ready engine may hang; else empty.
        compiled: `compiled`, `compiling`, or the reason why the model is not compiled.
        batch_sizes: fixed launch sizes; None if any size is launched.
        queue_depth: number of waiting images.
        restarts: number of restarts after a failure.
    """

    device: str
    state: EngineState
    reason: str
    compiled: str
    batch_sizes: tuple[int, ...] | None
    queue_depth: int
    restarts: int = 0


def attributes(names: Iterable[str], *sources: object) -> dict[str, Any]:
    """Return each attribute from the first source that has it; skip names without a source."""
    return {
        name: getattr(source, name)
        for source in reversed(sources)
        for name in names
        if hasattr(source, name)
    }
