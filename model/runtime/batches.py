"""What a batch is computed for, what it gives, and the sizes that it is computed in.

The libraries that run a network on the CPU (oneDNN, within torch and OpenVINO) make kernels for each batch size that
they meet, and keep them: 2 MiB a size and stream in OpenVINO, 8 MiB a size in torch with bfloat16, for a network of
1.9 million parameters. If every size up to the largest were launched, a service would grow for as long as it meets new
sizes, which are rare ones in the end. A batch of more than 8 images is therefore cut. A further launch costs about as
much as one image, where padding to the next size would cost up to half of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig, ViTConfig
from model.outputs import Pooling, RequestedOutputs, embedding_name

T = TypeVar("T")

Images = NDArray[np.uint8] | Sequence[NDArray[np.uint8]]
"""A batch: uint8 [B, H, W, C], or B of uint8 [H, W, C] that lie anywhere."""

UNCUT: Final = 8
"""Images in the largest batch that is always computed in one piece."""


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
    def beside(self) -> tuple[str, ...]:
        """Return the names of the outputs that every pass gives, and that come to the host only on request."""
        return (*(("logits",) if self.logits else ()), *self.embeddings)

    @property
    def computed(self) -> BatchRequest:
        """Return it without `beside`: what a CUDA graph is captured for."""
        return replace(self, logits=False, embeddings=())

    @property
    def of_network(self) -> BatchRequest:
        """Return it without what is made of the network's output."""
        return replace(self.computed, top_k=1)

    @property
    def extras(self) -> BatchRequest:
        """Return what of it makes the pass longer, whichever layers and classes are asked for."""
        return BatchRequest(relevance=self.relevance, all_tokens=self.all_tokens)

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
        scores: float32 [B, k], highest first; this and what follows is made by `Scores`, or on a GPU by `TopK`.
        indices: int64 [B, k], the classes that the scores belong to.
        finite: bool [B], whether all scores of the image are finite.
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


def stacked(images: Images) -> NDArray[np.uint8]:
    """Return a batch as one array, uint8 [B, H, W, C]."""
    return images if isinstance(images, np.ndarray) else np.stack(images)


def piece_sizes(count: int, sizes: Sequence[int] | None = None) -> list[int]:
    """Return the sizes of the pieces of a batch, in the order of its images; most often one or two.

    A piece has 1 ... 8 images, or a power of two, or one and a half times that: 12 is left out, as 8 and 4 are sizes.

    Args:
        sizes: that a piece may have instead of these, with 1 among them; None for these.
    """
    pieces = []
    if sizes is not None:
        while count:
            pieces.append(max(size for size in sizes if size <= count))
            count -= pieces[-1]
        return pieces
    while count > UNCUT:
        power = 1 << (count.bit_length() - 1)
        largest = power * 3 // 2 if power > UNCUT and count >= power * 3 // 2 else power
        pieces.append(largest)
        count -= largest
    return [*pieces, count] if count else pieces


def sizes_in_use(max_batch: int) -> list[int]:
    """Return every size that a piece of a batch of 1 ... `max_batch` images can have, descending."""
    return [size for size in range(max_batch, 0, -1) if piece_sizes(size) == [size]]


def compute_in_pieces(
    images: NDArray[np.uint8], compute: Callable[[NDArray[np.uint8]], HostOutputs], sizes: Sequence[int] | None = None
) -> HostOutputs:
    """Compute each piece (see `piece_sizes`) of a batch [B, H, W, C], and return their outputs as one."""
    return joined([compute(piece) for piece in pieces(images, sizes)])


def pieces(images: NDArray[np.uint8], sizes: Sequence[int] | None = None) -> list[NDArray[np.uint8]]:
    """Return the pieces of a batch [B, H, W, C], of the sizes that `piece_sizes` returns."""
    return np.split(images, np.cumsum(piece_sizes(len(images), sizes))[:-1])


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
    """
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < largest:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(8, octave // 4))
    return (*(size for size in sizes if size < largest), largest)


def powers_of_two(largest: int) -> tuple[int, ...]:
    """Return the batch sizes 1, 2, 4, ... that are below the largest, and the largest."""
    return (*(1 << power for power in range((largest - 1).bit_length())), largest)
