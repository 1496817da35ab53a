"""The interface between the predictor and the backends, which run the network."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig
from model.errors import DeviceError, NewProcessNeeded, NotFinite
from model.outputs import MapRequest
from model.runtime.batches import BatchRequest, HostOutputs, Images

CompileMode = Literal["auto", "on", "off"]

WITHOUT_GRAPHS: Final = "no-graphs"
"""In place of a `CompileMode`: what a process whose capture broke off asks its successor for. It is no setting."""

_TOLERANCES: Final = {"logits": (1e-3, 0.1), "attention": (0.01, 0.3), "relevance": (0.05, 0.5)}
"""Largest norm of the difference between two ways of computing an output, relative to the output's own norm: in
float32, and in dtypes of fewer bits. A way that lost something is off by its own norm. ViT-Ti/16 in bfloat16 is off by
0.01, and by 0.1 in relevance, which is a difference of large numbers."""


class CompilationState(enum.Enum):
    """The states of compiling the network."""

    OFF = "off"
    SKIPPED = "skipped"
    COMPILING = "compiling"
    COMPILED = "compiled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Compilation:
    """The state of the compilation; as a string it is one line for `/model`.

    Attributes:
        state: what became of it.
        reason: why it was skipped or failed; empty in other states.
        graphs: what became of the CUDA graphs, where that is not a matter of course.
    """

    state: CompilationState
    reason: str = ""
    graphs: str = ""

    def __str__(self) -> str:
        texts = {CompilationState.SKIPPED: self.reason, CompilationState.FAILED: f"failed: {self.reason}"}
        text = texts.get(self.state, self.state.value)
        return f"{text}; {self.graphs}" if self.graphs else text


class Backend(Protocol):
    """Runs the network on its device; images are uint8 [B, H, W, C] in host memory.

    Attributes:
        name: the library that runs the network, with its version.
        compilation: whether the network is compiled, or why it is not.
        batch_sizes: the only sizes launched, smaller batches being padded up; None when any size is.
    """

    name: str
    compilation: Compilation
    batch_sizes: tuple[int, ...] | None

    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        """Return what is asked of a batch, or more, in host memory.

        It is called by as many threads at once as there are streams.

        Raises:
            RuntimeError: as the library raises it (out of memory, a device fault).
        """

    def explain(
        self, images: NDArray[np.uint8], targets: NDArray[np.int64] | NDArray[np.float32], request: MapRequest
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return `model.explanation.methods.explain` of a batch, in host memory; always torch's.

        It may be called by one more thread than `predict`.

        Raises:
            RuntimeError: as torch raises it.
        """

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the logits of a batch, before the temperature: [B, num_classes] in host memory."""

    def exercise(self, sizes: Sequence[int]) -> None:
        """Run batches of noise and black of these sizes, with and without the last layer's attention row.

        Raises:
            NotFinite: the model gives scores that are not finite.
            RuntimeError: as the library raises it.
        """

    def fill_caches(self, size: int) -> None:
        """Run batches of this size wherever they may run later, so that what is kept for a size is there by then.

        Raises:
            DeviceError: the model gives scores that are not finite.
            RuntimeError: as the library raises it.
        """

    def defers(self, request: BatchRequest) -> bool:
        """Return whether `predict` would first load what takes a second or two; soon after it has, it never does."""

    def compile(self) -> None:
        """Compile as the settings ask for, at once or in the background; `compilation` tells a failure."""


class Built(NamedTuple):
    """What a predictor is made of; see the attributes of `Predictor`."""

    device: str
    dtype: str
    gpu_uuid: str | None
    parameters: int
    max_batch: int
    streams: int
    backend: Backend
    reason: str


def require_close(outputs: HostOutputs, expected: HostOutputs, *, exact: bool, source: str) -> None:
    """Check the network's outputs for a batch against torch's own.

    Args:
        outputs: on the host, computed by `source`.
        expected: on the host, of the same images and perhaps more.
        exact: whether both were computed in float32.

    Raises:
        DeviceError: one that `_TOLERANCES` names is further away than it allows.
    """
    theirs = expected.tensors()
    for name, output in outputs.tensors().items():
        if name in _TOLERANCES and name in theirs:
            reference = theirs[name][: len(output)]
            # A head that is all zeros gives zeros in both.
            relative = float(np.linalg.norm(output - reference) / max(float(np.linalg.norm(reference)), 1e-6))
            if not relative <= _TOLERANCES[name][not exact]:
                raise DeviceError(f"{source}'s {name} are {relative:.2g} of their norm away from torch's")


def trial_images(config: NetworkConfig, count: int, turn: int) -> NDArray[np.uint8]:
    """Return images [count, H, W, C] that are noise and black in turn; the first one is noise on even turns.

    Neither does for the other: where black normalises to 0, a model answers it whatever its weights are.
    """
    shape = (count, *config.image_size, config.in_channels)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    images[(turn + 1) % 2 :: 2] = 0
    return images


def require_finite(values: NDArray[Any], device: str, dtype: str) -> None:
    """Raise NotFinite unless all logits or scores of a warm-up are finite."""
    if not np.isfinite(values).all():
        raise NotFinite(f"{device}: warm-up gave scores that are not finite in {dtype}")


def batch_too_large(device: str, batch: int) -> DeviceError:
    """Return the error of a largest batch that the device's memory does not hold: half of it may be."""
    message = f"{device}: not enough memory for batches of {batch}"
    if batch == 1:
        return DeviceError(message)
    return NewProcessNeeded(f"{message}: a smaller largest batch needs less", "max_batch", batch // 2)
