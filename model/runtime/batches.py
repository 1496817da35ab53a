"""Batches: what one pass computes, what it gives, and the pieces that a batch is computed in. No torch is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig, ViTConfig
from model.heads import Head
from model.outputs import Pooling, RequestedOutputs, embedding_name

T = TypeVar("T")

Images = NDArray[np.uint8] | Sequence[NDArray[np.uint8]]
"""A batch: uint8 [B, H, W, C], or B of uint8 [H, W, C] that lie anywhere."""

SIZES: Final = (1, 2, 4, 8)
"""What networks are compiled for on a CPU. There a larger batch takes no less time an image."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What one pass of the network computes for a batch: all that is asked of any of its images.

    Attributes:
        top_k: how many classes.
        logits: whether to return the logits of all classes.
        layers: the layers whose attention rows to return, ascending.
        relevance: whether to return the relevance of each image's best class.
        embeddings: the names of those to return, as of `embedding_name`.
        all_tokens: whether one of them needs tokens of the last block that the head does not read.
    """

    top_k: int = 1
    logits: bool = False
    layers: tuple[int, ...] = ()
    relevance: bool = False
    embeddings: tuple[Pooling, ...] = ()
    all_tokens: bool = False

    @classmethod
    def of(cls, requests: Sequence[RequestedOutputs], config: NetworkConfig) -> BatchRequest:
        """Return what a batch of these requests to a model is computed for."""
        maps = [request.map for request in requests if request.map is not None]
        pools = {request.embedding.pool for request in requests if request.embedding is not None}
        embeddings = tuple(sorted({embedding_name(config, pool) for pool in pools}))
        return cls(
            top_k=max(request.top_k for request in requests),
            # The evidence of a class that a caller names is made of all logits, and so is a set of labels.
            logits=any(request.logits or request.label_set for request in requests)
            or any(each.class_index is not None for each in maps),
            layers=tuple(sorted({each.layer for each in maps if each.layer is not None})),
            relevance=any(each.of_best_class for each in maps),
            embeddings=embeddings,
            all_tokens="mean" in embeddings and isinstance(config, ViTConfig) and config.pool == "cls",
        )

    @property
    def computed(self) -> BatchRequest:
        """Return it without what every pass gives and comes to the host on request: what a CUDA graph is made for."""
        return replace(self, logits=False, embeddings=())

    @property
    def of_network(self) -> BatchRequest:
        """Return it without what is made of the network's output."""
        return replace(self.computed, top_k=1)

    def covers(self, other: BatchRequest) -> bool:
        """Return whether a network that computes this gives all outputs of another request."""
        return (
            other.layers in ((), self.layers)
            and other.relevance <= self.relevance
            and other.all_tokens <= self.all_tokens
        )


class BatchOutputs(NamedTuple, Generic[T]):
    """What a batch gives: values whose first axis is that of its images; None is what was not computed.

    They are tensors of torch on a device, and arrays of NumPy on the host.

    Attributes:
        logits: [B, num_classes], before the temperature.
        attention: rows of the layers that were asked for, or of more, float32 [B, layers, heads, N].
        relevance: `token_relevance` of the best class, float32 [B, N].
        head, cls, mean: embeddings of these names, [B, `embedding_width`]; see `ViTOutput.embeddings`.
        scores, indices, finite: see `model.heads.Best`.
    """

    logits: T | None = None
    attention: T | None = None
    relevance: T | None = None
    head: T | None = None
    cls: T | None = None
    mean: T | None = None
    scores: T | None = None
    indices: T | None = None
    finite: T | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, T]) -> BatchOutputs[T]:
        """Return outputs of these names."""
        return cls._make(tensors.get(name) for name in cls._fields)

    def tensors(self) -> dict[str, T]:
        """Return those that were computed, by name."""
        return {name: value for name, value in zip(self._fields, self, strict=True) if value is not None}


HostOutputs = BatchOutputs[NDArray[Any]]
"""What a batch gives, in host memory; floats are float32."""


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
    images: NDArray[np.uint8], compute: Callable[[NDArray[np.uint8]], HostOutputs], sizes: Sequence[int] = SIZES
) -> HostOutputs:
    """Compute the pieces of a batch [B, H, W, C], and return their outputs as one."""
    return joined([compute(piece) for piece in pieces(images, sizes)])


def joined(parts: Sequence[HostOutputs]) -> HostOutputs:
    """Return the outputs of a batch's pieces as one."""
    if len(parts) == 1:
        return parts[0]
    arrays = [part.tensors() for part in parts]
    return BatchOutputs.of({name: np.concatenate([part[name] for part in arrays]) for name in arrays[0]})


def launch_size(count: int, sizes: tuple[int, ...] | None) -> int:
    """Return the smallest of the ascending sizes that holds `count` images; `count` itself when sizes are None."""
    return count if sizes is None else next(size for size in sizes if size >= count)


def captured_sizes(largest: int) -> tuple[int, ...]:
    """Return the batch sizes that become CUDA graphs: powers of two up to 16, then four to an octave, and the largest.

    Padding is at most a quarter beyond 32 images; the fewer they are, the less the device's time depends on them.
    A single image is launched as two: compiled code is for two and more.
    """
    sizes = [2, 4, 8, 16]
    while sizes[-1] < largest:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(8, octave // 4))
    return (*(size for size in sizes if size < largest), largest)
