"""The interface between the predictor and the backends, which run the network.

No torch is needed.
"""

import enum
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig, ViTConfig
from model.errors import DeviceError, NewProcessNeeded
from model.heads import Head
from model.outputs import RIVALS, MapRequest, Pooling, RequestedOutputs

T = TypeVar("T")


class Aim(NamedTuple):
    """A request for the relevance of another head's class.

    Attributes:
        place: of the image in its batch.
        features: what the head reads.
        direction: makes of these features of the image, [D], what the relevance begins with,
            float32 [D]; see `Head.target`.
    """

    place: int
    features: Pooling
    direction: Callable[[NDArray[np.float32]], NDArray[np.float32]]


# The graphs that OpenVINO computes, each a network of its own: a picture pays only for what is
# asked of its batch.
GraphKind = Literal["plain", "relevance", "transfer"]

# A batch: uint8 [B, H, W, C], or B of uint8 [H, W, C] that lie anywhere.
Images = NDArray[np.uint8] | Sequence[NDArray[np.uint8]]

# What networks are compiled for on a CPU. There a larger batch takes no less time an image.
SIZES: Final = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What one pass of the network computes for a batch: all that is asked of any of its images.

    Attributes:
        top_k: how many classes.
        logits: whether to return the logits of all classes.
        layers: the layers whose attention rows to return, ascending.
        relevance: whether to return the relevance of each image's best class.
        embeddings: which to return, sorted.
        all_tokens: whether one of them needs tokens of the last block that the head does not read.
        transfer: whether one of them is `transfer`, which takes outputs of several blocks.
    """

    top_k: int = 1
    logits: bool = False
    layers: tuple[int, ...] = ()
    relevance: bool = False
    embeddings: tuple[Pooling, ...] = ()
    all_tokens: bool = False
    transfer: bool = False

    @classmethod
    def of(cls, requests: Sequence[RequestedOutputs], config: NetworkConfig) -> Self:
        """Return what a batch of these requests to a model is computed for."""
        maps = [request.map for request in requests if request.map is not None]
        pools = {request.embedding.pool for request in requests if request.embedding is not None}
        pools |= {each.by.features for each in maps if each.by is not None}
        embeddings = tuple(sorted(pools))
        return cls(
            top_k=max(request.top_k for request in requests),
            # The evidence of a class is made of all logits, and so is a set of labels.
            logits=any(request.logits or request.label_set for request in requests)
            or any(each.is_class_specific and each.by is None for each in maps),
            layers=tuple(sorted({each.layer for each in maps if each.layer is not None})),
            relevance=any(each.of_best_class for each in maps),
            embeddings=embeddings,
            all_tokens=not {"mean", "transfer"}.isdisjoint(embeddings)
            and isinstance(config, ViTConfig)
            and config.pool == "cls",
            transfer="transfer" in embeddings,
        )

    @classmethod
    def of_graph(cls, kind: "GraphKind", config: NetworkConfig) -> Self:
        """Return what a graph of OpenVINO computes for a model."""
        # A mean over the patch queries takes all scores of a block: torch computes it where it is
        # asked for.
        layers: tuple[int, ...] = ()
        if isinstance(config, ViTConfig) and config.attention_source != "patch_mean":
            layers = (config.depth - 1,)
        is_transfer = kind == "transfer"
        all_tokens = is_transfer and isinstance(config, ViTConfig) and config.pool == "cls"
        return cls(
            layers=layers,
            relevance=kind == "relevance",
            all_tokens=all_tokens,
            transfer=is_transfer,
        )

    @property
    def graph_kind(self) -> "GraphKind":
        """Return which graph may give this; `covers` says whether it does."""
        if self.relevance:
            return "relevance"
        return "transfer" if self.transfer or self.all_tokens else "plain"

    @property
    def computed(self) -> Self:
        """Return it without what every pass gives and comes to the host on request: what a CUDA
        graph is made for.
        """
        return replace(self, logits=False, embeddings=())

    @property
    def of_network(self) -> Self:
        """Return it without what is made of the network's output."""
        return replace(self.computed, top_k=1)

    def covers(self, other: Self) -> bool:
        """Return whether a network that computes this gives all outputs of another request."""
        return (
            other.layers in ((), self.layers)
            and other.relevance <= self.relevance
            and other.all_tokens <= self.all_tokens
            and other.transfer <= self.transfer
        )


class BatchOutputs(NamedTuple, Generic[T]):
    """What a batch gives: values whose first axis is that of its images; None is what was not
    computed.

    They are tensors of torch on a device, and arrays of NumPy on the host.

    Attributes:
        logits: [B, num_classes], before the temperature.
        attention: rows of the layers that were asked for, or of more, float32 [B, layers, heads,
        N].
        relevance: `token_relevance` of the best class, float32 [B, N].
        head, cls, mean, transfer: embeddings of these names, [B, `embedding_width`]; see
        `ViTOutput.embeddings`.
        scores, indices, finite: see `model.heads.Best`.
        aimed: `token_relevance` of each aim, float32 [aims, N].
    """

    logits: T | None = None
    attention: T | None = None
    relevance: T | None = None
    head: T | None = None
    cls: T | None = None
    mean: T | None = None
    transfer: T | None = None
    scores: T | None = None
    indices: T | None = None
    finite: T | None = None
    aimed: T | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, T]) -> Self:
        """Return outputs of these names."""
        return cls._make(tensors.get(name) for name in cls._fields)

    def tensors(self) -> dict[str, T]:
        """Return those that were computed, by name."""
        return {
            name: value for name, value in zip(self._fields, self, strict=True) if value is not None
        }


# What a batch gives, in host memory; floats are float32.
HostOutputs = BatchOutputs[NDArray[Any]]


def with_best(outputs: HostOutputs, head: Head, top_k: int) -> HostOutputs:
    """Return the outputs of a network with the `top_k` best classes of each image."""
    assert outputs.logits is not None
    return outputs._replace(**head.best(outputs.logits, top_k)._asdict())


def stacked(images: Images) -> NDArray[np.uint8]:
    """Return a batch as one array, uint8 [B, H, W, C]."""
    return images if isinstance(images, np.ndarray) else np.stack(images)


def pieces(images: NDArray[np.uint8], sizes: Sequence[int] = SIZES) -> list[NDArray[np.uint8]]:
    """Cut a batch [B, H, W, C] to pieces of these sizes, with 1 among them, the largest first."""
    ends = [0]
    while ends[-1] < len(images):
        ends.append(ends[-1] + max(size for size in sizes if size <= len(images) - ends[-1]))
    return np.split(images, ends[1:-1])


def compute_in_pieces(
    images: NDArray[np.uint8],
    compute: Callable[[NDArray[np.uint8]], HostOutputs],
    sizes: Sequence[int] = SIZES,
) -> HostOutputs:
    """Compute the pieces of a batch [B, H, W, C], and return their outputs as one."""
    return joined([compute(piece) for piece in pieces(images, sizes)])


def joined(parts: Sequence[HostOutputs]) -> HostOutputs:
    """Return the outputs of a batch's pieces as one."""
    if len(parts) == 1:
        return parts[0]
    arrays = [part.tensors() for part in parts]
    return BatchOutputs.of(
        {name: np.concatenate([part[name] for part in arrays]) for name in arrays[0]}
    )


def launch_size(count: int, sizes: tuple[int, ...] | None) -> int:
    """Return the smallest of the ascending sizes that holds `count` images; `count` itself when
    sizes are None.
    """
    return count if sizes is None else next(size for size in sizes if size >= count)


def captured_sizes(largest: int) -> tuple[int, ...]:
    """Return the batch sizes that become CUDA graphs: powers of two up to 16, then four to an
    octave, and the largest.

    Padding is at most a quarter beyond 32 images; the fewer they are, the less the device's time
    depends on them. A single image is launched as two: compiled code is for two and more.
    """
    sizes = [2, 4, 8, 16]
    while sizes[-1] < largest:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(8, octave // 4))
    return (*(size for size in sizes if size < largest), largest)


class ThreadPolicy:
    """Gives a batch all threads when it is alone, and one when others compute beside it.

    A batch on a single thread needs no barrier between operators, at which threads wait for each
    other longest when the machine is busy; a lone batch is done sooner with all `count` of them. It
    is a context manager around the computation, and enters with whether it is alone. Explanations
    count as a batch, though they always take one thread. So do the batches of other models of this
    process, which has the cores once.
    """

    _lock = threading.Lock()
    _running = 0

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> bool:
        with ThreadPolicy._lock:
            ThreadPolicy._running += 1
            return ThreadPolicy._running == 1

    def __exit__(self, *_: object) -> None:
        with ThreadPolicy._lock:
            ThreadPolicy._running -= 1


CompileMode = Literal["auto", "on", "off"]

# In place of a `CompileMode`: what a process whose capture broke off asks its successor for. It is
# no setting.
WITHOUT_GRAPHS: Final = "no-graphs"

# Largest norm of the difference between two ways of computing an output of one image, relative to
# the output's own norm: in float32, and in dtypes of fewer bits. A way that lost something is off
# by its own norm. ViT-Ti/16 in bfloat16 is off by 0.01, and by 0.1 in relevance, which is a
# difference of large numbers: by 0.26 in one of 128 of noise.
_TOLERANCES: Final = {
    "logits": (1e-3, 0.1),
    "attention": (0.01, 0.3),
    "relevance": (0.05, 0.9),
    "transfer": (1e-3, 0.1),
}


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
        texts = {
            CompilationState.SKIPPED: self.reason,
            CompilationState.FAILED: f"failed: {self.reason}",
        }
        text = texts.get(self.state, self.state.value)
        return f"{text}; {self.graphs}" if self.graphs else text


class Backend(Protocol):
    """Runs the network on its device; images are uint8 [B, H, W, C] in host memory.

    Attributes:
        name: the library that runs the network, with its version.
        compilation: whether the network is compiled, or why it is not.
        batch_sizes: the only sizes launched, smaller batches being padded up; None when any size
        is.
        usual: requests whose part of the network is tried, compiled and captured before the first
        batch.
        largest_tried: images in the largest batch that is tried before the first one; None: the
        largest of all.
        compiles_beside: whether `compile` may run on a thread of its own while batches are
        computed.
    """

    name: str
    compilation: Compilation = Compilation(CompilationState.OFF)
    batch_sizes: tuple[int, ...] | None = None
    usual: tuple[BatchRequest, ...]
    largest_tried: int | None = None
    compiles_beside: bool = False

    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        """Return what is asked of a batch, or more, in host memory.

        It is called by as many threads at once as there are streams.

        Raises:
            RuntimeError: as the library raises it (out of memory, a device fault).
        """

    def aim(self, images: Images, request: BatchRequest, aims: Sequence[Aim]) -> HostOutputs:
        """Return what `predict` does, and from the same pass the relevance of aims; always torch's,
        as `explain`.
        """

    def explain(
        self,
        images: NDArray[np.uint8],
        targets: NDArray[np.int64] | NDArray[np.float32],
        request: MapRequest,
        features: Pooling = "head",
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return `model.explanation.explain.explain` of a batch; always torch's.

        It may be called by one more thread than `predict`.

        Raises:
            RuntimeError: as torch raises it.
        """

    def covers(self, request: BatchRequest) -> bool:
        """Return whether a graph computes all that is asked for; True where there is none for parts
        of it either.
        """
        return True

    def defers(self, request: BatchRequest) -> bool:
        """Return whether `predict` would first load what takes a second or two; soon after it has,
        it never does.
        """
        return False

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

    It finds a network that computes something else: a layer that was lost, a wrong weight, a graph
    that does nothing, images in another order. It does not bound rounding: kernels of other launch
    sizes round otherwise, and in bfloat16 that moves relevance, a difference of large numbers, far
    more than logits.

    Relevance is of the best class's margin over its rivals. Where rounding makes another class one
    of these, it is of something else, and not compared.

    Args:
        outputs: on the host, computed by `source`.
        expected: on the host, of the same images and perhaps more.
        exact: whether both were computed in float32.

    Raises:
        DeviceError: an image's output that `_TOLERANCES` names is further away than it allows.
    """
    ours, theirs = outputs.tensors(), expected.tensors()
    count = len(ours["logits"])
    same_margin = (_in_margin(ours["logits"]) == _in_margin(theirs["logits"][:count])).all(axis=1)
    for name in _TOLERANCES.keys() & ours.keys() & theirs.keys():
        reference = theirs[name][:count].reshape(count, -1)
        away = np.linalg.norm(ours[name].reshape(count, -1) - reference, axis=1)
        norms = np.linalg.norm(reference, axis=1)
        # A head that is all zeros gives zeros in both.
        relative = away / np.maximum(norms, 1e-6)
        worst = float(
            relative[same_margin].max(initial=0.0) if name == "relevance" else relative.max()
        )
        if not worst <= _TOLERANCES[name][not exact]:
            raise DeviceError(
                f"{source}'s {name} of an image are {worst:.2g} of their norm away from torch's"
            )


def _in_margin(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the best class of logits [B, C] and the rivals that its relevance sets it against,
    these in any order.
    """
    ranked = np.argsort(-logits, axis=1, kind="stable")[:, : RIVALS + 1]
    return np.concatenate((ranked[:, :1], np.sort(ranked[:, 1:], axis=1)), axis=1)


def noise_images(count: int, shape: Sequence[int], seed: int = 0) -> NDArray[np.uint8]:
    """Return images of noise, uint8 [count, H, W, C], the same for each seed: outputs are compared
    on them.

    On black and white alone the outputs of bfloat16 are eight times as far from float32's as on
    noise and pictures.

    Args:
        shape: (H, W, C).
    """
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def trial_images(config: NetworkConfig, count: int, turn: int = 0) -> NDArray[np.uint8]:
    """Return images [count, H, W, C] that are noise, black and white in turn, beginning with a
    turn's.

    None does for the others: where black normalises to 0, a model answers it whatever its weights
    are.
    """
    images = noise_images(count, (*config.image_size, config.in_channels))
    images[(turn + 1) % 3 :: 3] = 0
    images[(turn + 2) % 3 :: 3] = 255
    return images


def batch_too_large(device: str, batch: int) -> DeviceError:
    """Return the error of a largest batch that the device's memory does not hold: half of it may
    be.
    """
    message = f"{device}: not enough memory for batches of {batch}"
    if batch == 1:
        return DeviceError(message)
    return NewProcessNeeded(
        f"{message}: a smaller largest batch needs less", "max_batch", batch // 2
    )
