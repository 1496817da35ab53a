"""The device: a model runner that takes virtual time, answers by what stands in the pixels, and fails as it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.config import PreprocessConfig, ViTConfig
from model.errors import DeviceError
from model.outputs import AttentionMap, MapRequest, Outputs, RequestedOutputs
from service.engine.messages import InferenceRequest, InferenceResult, ModelInfo
from tests.simulation.scheduler import Scheduler
from tests.simulation.threads import Threads

GOOD, POISON, NAN = range(3)
"""What the model makes of an image: an answer; an error of the whole batch; scores that are no numbers."""

_SIZE = (2, 2)
_CONFIG = ViTConfig(image_size=_SIZE, patch_size=1, width=2, depth=2, heads=1, mlp_width=2, num_classes=8)
_PREPROCESS = PreprocessConfig(
    size=_SIZE,
    resize="squash",
    resize_size=_SIZE,
    interpolation="nearest",
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
_INFO = ModelInfo(
    "simulated", "nowhere", None, "none", "vit", 1, _CONFIG, _PREPROCESS, ("label",) * 8, 1.0, False,
    "cuda", "float32", "simulated", 1, None,
)  # fmt: skip


class Defect(BaseException):
    """Ends an engine's thread: a defect of the model's code."""


def image(number: int, kind: int) -> NDArray[np.uint8]:
    """Return an image that carries its number, uint8 [2, 2, 3]."""
    pixels = np.zeros(12, np.uint8)
    pixels[:4] = np.frombuffer(number.to_bytes(4, "little"), np.uint8)
    pixels[4] = kind
    return pixels.reshape(2, 2, 3)


def number_of(pixels: NDArray[np.uint8]) -> int:
    """Return the number that an image carries."""
    assert isinstance(pixels, np.ndarray), "no picture of the simulation is encoded"
    return int.from_bytes(pixels.tobytes()[:4], "little")


def is_own(result: InferenceResult, request: InferenceRequest) -> bool:
    """Return whether a result is the answer to this request, all of it and nothing else."""
    number = number_of(request.pixels)
    wanted = None if request.requested.map is None else float(number % 251)
    outputs, top_k = result.outputs, request.requested.top_k
    return (
        outputs.indices.tolist() == list(range(number, number + top_k))
        and outputs.scores.tolist() == [0.5**i for i in range(top_k)]
        and (None if outputs.map is None else float(outputs.map.values[0, 0])) == wanted
    )


def _map(wanted: MapRequest, number: int) -> AttentionMap:
    return AttentionMap(wanted, np.full(_SIZE, number % 251, np.float32), 1.0)


class Device:
    """Stands in for `model.runtime.predictor.Predictor`.

    Args:
        seconds: how long the next batch takes.

    Attributes:
        running, explaining: batches that are computed at this moment, without and with a pass of their own for maps.
        idle_since, unexplaining_since: when a stream last became free, and the thread of explanations.
        failing: whether a thread ended or is about to.
        engine: what launches on it, once that is made.
        dead: whether everything fails from now on.
        defect: whether the next batch ends the thread.
    """

    batch_sizes = None
    compiled = "off"

    def __init__(
        self,
        scheduler: Scheduler,
        threads: Threads,
        seconds: Callable[[], float],
        *,
        name: str,
        max_batch: int,
        streams: int,
    ) -> None:
        self.device = name
        self.max_batch = max_batch
        self.streams = streams
        self.running = self.explaining = 0
        self.idle_since = self.unexplaining_since = scheduler.now
        self.dead = False
        self.defect = False
        self.failing = False
        self.engine: Any = None
        self._scheduler = scheduler
        self._threads = threads
        self._seconds = seconds

    def info(self) -> ModelInfo:
        """Return the description of the model."""
        return replace(_INFO, device=self.device, max_batch=self.max_batch)

    def warm_up(self) -> None:
        self._compute()

    def check(self) -> None:
        self._compute()
        if self.dead:
            self.failing = True
            raise DeviceError(f"{self.device}: the model does not run")

    def defers(self, requested: RequestedOutputs) -> bool:
        return False

    def launch_size(self, count: int) -> int:
        return count

    def embed_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        raise NotImplementedError("no scenario has a text tower")

    def predict(self, images: Sequence[NDArray[np.uint8]], requests: Sequence[RequestedOutputs]) -> list[Outputs]:
        if not 0 < len(images) <= self.max_batch:
            self._scheduler.violate(f"{self.device}: a batch of {len(images)}, where {self.max_batch} are allowed")
        if any(requested.needs_pass for requested in requests) != self._explains():
            self._scheduler.violate(f"{self.device}: explanations and classification are not apart")
        numbers = [number_of(pixels) for pixels in images]
        kinds = [int(np.asarray(pixels).flat[4]) for pixels in images]
        self._scheduler.note(f"{self.device} computes", numbers)
        self._compute()
        if self.defect:
            self.failing = True
            raise Defect
        if self.dead or POISON in kinds:
            raise RuntimeError("it does not compute")
        return [
            Outputs(
                np.array([0.5**i for i in range(requested.top_k)], np.float32),
                np.arange(number, number + requested.top_k, dtype=np.int64),
                None if requested.map is None else _map(requested.map, number),
                finite=kind != NAN,
            )
            for number, kind, requested in zip(numbers, kinds, requests, strict=True)
        ]

    def _explains(self) -> bool:
        """Return whether the thread that runs is that of explanations."""
        return self._threads.current is not None and self._threads.current.name == "engine-maps"

    def _compute(self) -> None:
        explains = self._explains()
        self.explaining += explains
        self.running += not explains
        if self.running > self.streams or self.explaining > 1:
            self._scheduler.violate(
                f"{self.device}: {self.running} batches at once on {self.streams} streams, {self.explaining} explained"
            )
        self._threads.sleep(self._seconds())
        self.explaining -= explains
        self.running -= not explains
        if explains:
            self.unexplaining_since = self._scheduler.now
        else:
            self.idle_since = self._scheduler.now
