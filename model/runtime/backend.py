"""The interface between the predictor and the backends, which run the network. No torch is needed."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig
from model.errors import DeviceError, NewProcessNeeded
from model.outputs import MapRequest
from model.runtime.batches import BatchRequest, HostOutputs, Images

CompileMode = Literal["auto", "on", "off"]

WITHOUT_GRAPHS: Final = "no-graphs"
"""In place of a `CompileMode`: what a process whose capture broke off asks its successor for. It is no setting."""

_TOLERANCES: Final = {"logits": (1e-3, 0.1), "attention": (0.01, 0.3), "relevance": (0.05, 0.5)}
"""Largest norm of the difference between two ways of computing an output of one image, relative to the output's own
norm: in float32, and in dtypes of fewer bits. A way that lost something is off by its own norm. ViT-Ti/16 in bfloat16
is off by 0.01, and by 0.1 in relevance, which is a difference of large numbers."""

_LEAST_NORM: Final = 0.1
"""Of an image's output, as a share of the batch's mean: less than that is a difference of numbers that cancel out."""


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
        reason: why it was skipped or failed; empty in other states.
        graphs: about the CUDA graphs, where that is not a matter of course.
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
        usual: requests whose part of the network is tried, compiled and captured before the first batch.
        largest_tried: images in the largest batch that is tried before the first one; None: the largest of all.
    """

    name: str
    compilation: Compilation
    batch_sizes: tuple[int, ...] | None
    usual: tuple[BatchRequest, ...]
    largest_tried: int | None

    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        """Return what is asked of a batch, or more, in host memory.

        It is called by as many threads at once as there are streams.

        Raises:
            RuntimeError: as the library raises it (out of memory, a device fault).
        """

    def explain(
        self, images: NDArray[np.uint8], targets: NDArray[np.int64] | NDArray[np.float32], request: MapRequest
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return `model.explanation.methods.explain` of a batch; always torch's.

        It may be called by one more thread than `predict`.

        Raises:
            RuntimeError: as torch raises it.
        """

    def defers(self, request: BatchRequest) -> bool:
        """Return whether `predict` would first load what takes a second or two; soon after it has, it never does."""

    def compile(self) -> None:
        """Compile as the settings ask for; `compilation` tells a failure."""


@dataclass(frozen=True, slots=True)
class Parts:
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
    """Check the network's outputs for each image of a batch against torch's own.

    Where the best class is another one, by rounding, relevance is of that one and not compared.

    Args:
        outputs: on the host, computed by `source`.
        expected: on the host, of the same images and perhaps more.
        exact: whether both were computed in float32.

    Raises:
        DeviceError: an image's output that `_TOLERANCES` names is further away than it allows.
    """
    ours, theirs = outputs.tensors(), expected.tensors()
    count = len(ours["logits"])
    same_class = ours["logits"].argmax(axis=1) == theirs["logits"][:count].argmax(axis=1)
    for name in _TOLERANCES.keys() & ours.keys() & theirs.keys():
        reference = theirs[name][:count].reshape(count, -1)
        away = np.linalg.norm(ours[name].reshape(count, -1) - reference, axis=1)
        norms = np.linalg.norm(reference, axis=1)
        # A head that is all zeros gives zeros in both.
        relative = away / np.maximum(norms, max(_LEAST_NORM * float(norms.mean()), 1e-6))
        worst = float(relative[same_class].max(initial=0.0) if name == "relevance" else relative.max())
        if not worst <= _TOLERANCES[name][not exact]:
            raise DeviceError(f"{source}'s {name} of an image are {worst:.2g} of their norm away from torch's")


def trial_images(config: NetworkConfig, count: int, turn: int = 0) -> NDArray[np.uint8]:
    """Return images [count, H, W, C] that are noise, black and white in turn, beginning with a turn's.

    None does for the others: where black normalises to 0, a model answers it whatever its weights are.
    """
    shape = (count, *config.image_size, config.in_channels)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    images[(turn + 1) % 3 :: 3] = 0
    images[(turn + 2) % 3 :: 3] = 255
    return images


def batch_too_large(device: str, batch: int) -> DeviceError:
    """Return the error of a largest batch that the device's memory does not hold: half of it may be."""
    message = f"{device}: not enough memory for batches of {batch}"
    if batch == 1:
        return DeviceError(message)
    return NewProcessNeeded(f"{message}: a smaller largest batch needs less", "max_batch", batch // 2)
