"""The interface between the predictor and the backends, which run the network.

No torch is needed.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from model.errors import DeviceError, NewProcessNeeded
from model.heads import Head
from model.outputs import BestClasses, MapRequest, Pooling
from model.runtime.batch_request import BatchRequest

# A batch: uint8 [B, H, W, C], or B separate arrays of uint8 [H, W, C].
Images = NDArray[np.uint8] | Sequence[NDArray[np.uint8]]

CompileMode = Literal["auto", "on", "off"]

# Compile mode that a failed process passes to the process that replaces it: no CUDA graphs, because
# a capture broke. Not a setting.
WITHOUT_GRAPHS: Final = "no-graphs"


class Aim(NamedTuple):
    """A request for the relevance of a class of a head that is not the checkpoint's own.

    Attributes:
        image: index of the image in its batch.
        head: the head.
        class_index: the class; None for the best one.
    """

    image: int
    head: Head
    class_index: int | None

    def target(self, features: NDArray[np.float32]) -> tuple[int, NDArray[np.float32]]:
        """Return `Head.map_target` for the features [B, D] of the batch."""
        return self.head.map_target(features[self.image], "relevance", self.class_index)


# Outputs of a batch by name, in host memory, with the images as the first axis. A pass gives those
# that it computes:
#
#     logits                     float32 [B, num_classes], before the temperature
#     attention                  rows of the requested layers or more, [B, layers, heads, N]
#     relevance                  `class_relevance` of the best class, float32 [B, N]
#     aimed                      `class_relevance` of each aim, float32 [aims, N]
#     head, cls, mean, transfer  embeddings, float32 [B, `embedding_width`]; see `ViTOutput`
#     scores, indices, finite    see `model.outputs.BestClasses`; only if a graph ranks the classes
HostOutputs = dict[str, NDArray[Any]]


def best_classes_of_graph(arrays: HostOutputs) -> BestClasses | None:
    """Return the best classes of the checkpoint's own head, or None if the host must rank them."""
    if "scores" not in arrays:
        return None
    return BestClasses(arrays["scores"], arrays["indices"], arrays["finite"])


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
        state: the state.
        reason: why it was skipped or failed; empty in other states.
        graphs: remark if CUDA graphs are off, or are of the uncompiled model; else empty.
    """

    state: CompilationState
    reason: str = ""
    graphs: str = ""

    def __str__(self) -> str:
        text = self.state.value
        if self.state is CompilationState.SKIPPED:
            text = self.reason
        elif self.state is CompilationState.FAILED:
            text = f"failed: {self.reason}"
        return f"{text}; {self.graphs}" if self.graphs else text


class TorchPasses(Protocol):
    """Passes that torch computes even if another library runs the network.

    Images are uint8 [B, H, W, C].

    One more thread may call these methods while others call `Backend.predict`. They raise torch's
    RuntimeError.
    """

    def aim(self, images: Images, request: BatchRequest, aims: Sequence[Aim]) -> HostOutputs:
        """Return the outputs of a batch with logits, and the relevance of aims by the same pass."""

    def explain(
        self,
        images: NDArray[np.uint8],
        targets: NDArray[np.int64] | NDArray[np.float32],
        request: MapRequest,
        features: Pooling = "head",
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return `model.explanation.explain.explain` of a batch."""


class Backend(Protocol):
    """Runs the network on its device; images are uint8 [B, H, W, C] in host memory.

    Attributes:
        name: the library that runs the network, with its version.
        compilation: whether the network is compiled, or why it is not.
        batch_sizes: the only sizes launched; smaller batches are padded. None allows any size.
        usual: requests whose part of the network is tried, compiled and captured before the first
            batch.
        largest_tried: images in the largest batch that is tried before the first one; None: the
            largest allowed.
        compiles_beside: whether `compile` may run on its own thread while batches are computed.
    """

    name: str
    compilation: Compilation = Compilation(CompilationState.OFF)
    batch_sizes: tuple[int, ...] | None = None
    usual: tuple[BatchRequest, ...]
    largest_tried: int | None = None
    compiles_beside: bool = False

    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        """Return at least the requested outputs of a batch, in host memory.

        The outputs include logits, or the best classes if the backend's graph ranks them. As many
        threads as there are streams call this at once.

        Raises:
            RuntimeError: from the library (out of memory, a device fault).
        """

    def load_torch(self) -> TorchPasses:
        """Return the passes that torch always computes.

        Raises:
            RuntimeError: torch cannot be loaded; the next call tries again.
        """

    def covers(self, request: BatchRequest) -> bool:
        """Return whether one launch computes the whole batch.

        If not, images whose requests a graph computes are launched separately.
        """
        return True

    def defers(self, request: BatchRequest) -> bool:
        """Return whether `predict` would first load something for a second or two.

        Once that is loaded, the result is False for good.
        """
        return False

    def compile(self) -> None:
        """Compile as the settings ask; a failure is in `compilation`."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a predictor; see the attributes of `Predictor`."""

    device: str
    dtype: str
    gpu_uuid: str | None
    parameters: int
    max_batch: int
    streams: int
    backend: Backend
    reason: str


def stacked(images: Images) -> NDArray[np.uint8]:
    """Return a batch as one array, uint8 [B, H, W, C]."""
    return images if isinstance(images, np.ndarray) else np.stack(images)


def batch_too_large(device: str, batch: int) -> DeviceError:
    """Return the error for a largest batch that does not fit into the device's memory.

    A new process may try half of it.
    """
    message = f"{device}: not enough memory for batches of {batch}"
    if batch == 1:
        return DeviceError(message)
    return NewProcessNeeded(f"{message}: choose a smaller largest batch", "max_batch", batch // 2)
