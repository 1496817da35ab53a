"""Postprocessing of logits to the best classes, the same on every device, and their one copy to the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.checkpoint import Checkpoint
from model.explanation.folded_weights import FoldedWeights
from model.explanation.relevance import KEPT, token_relevance
from model.network.vit import VisionTransformer

RELEVANCE: Final = -1
"""Among the attention layers that are wanted, it stands for the relevance of each image's best class."""


class NetworkOutput(NamedTuple):
    """The output of the network, with what maps are made of.

    Attributes:
        logits: [B, num_classes].
        attention: float32 [B, layers, heads, N]; None if no layer was asked for.
        relevance: `token_relevance` of the best class, float32 [B, N], or None.
    """

    logits: Tensor
    attention: Tensor | None
    relevance: Tensor | None = None

    def first(self, count: int) -> NetworkOutput:
        """Return the output of the first images."""
        logits, attention, found = self
        return NetworkOutput(
            logits[:count], None if attention is None else attention[:count], None if found is None else found[:count]
        )


def run_network(
    model: VisionTransformer, pixels: Tensor, layers: tuple[int, ...], folded: FoldedWeights | None = None
) -> NetworkOutput:
    """Run a model on normalised pixels [B, C, H, W].

    Args:
        layers: whose attention rows are wanted; may hold `RELEVANCE`.
        folded: see `token_relevance`.
    """
    wanted = RELEVANCE in layers
    output = model(pixels, tuple(layer for layer in layers if layer != RELEVANCE), KEPT if wanted else 0)
    if not wanted:
        return NetworkOutput(output.logits, output.attention)
    with one_thread(pixels.device):
        return NetworkOutput(output.logits, output.attention, token_relevance(model, output, weights=folded))


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Let the calling thread compute by itself in this context, on a CPU.

    Threads wait for each other at the end of each operation: longer than a small one takes, and longest where another
    process has the core of one of them.
    """
    count = torch.get_num_threads()
    if device.type != "cpu" or count == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


class TopKOutput(NamedTuple):
    """The best classes of a batch.

    Attributes:
        scores: float32 [B, k], highest first.
        indices: int64 [B, k].
        finite: bool [B], whether all scores of the image are finite.
        attention, relevance: see `NetworkOutput`.
        logits: float32 [B, num_classes], before the temperature; None if they were not asked for.
        decoded: see `model.prediction.BatchPrediction`.
    """

    scores: Tensor
    indices: Tensor
    finite: Tensor
    attention: Tensor | None
    relevance: Tensor | None = None
    logits: Tensor | None = None
    decoded: Mapping[int, NDArray[np.uint8] | None] = MappingProxyType({})


class Postprocess:
    """Turns logits into the top-k scores, on whichever device they are, as the checkpoint says."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._temperature = checkpoint.temperature
        self._independent = checkpoint.multi_label or checkpoint.config.num_classes == 1

    def scores(self, logits: Tensor) -> Tensor:
        """Return the score of each class, float32 [B, K], 0...1, from logits [B, K]."""
        logits = logits.float() / self._temperature
        return logits.sigmoid() if self._independent else logits.softmax(dim=-1)

    def __call__(self, output: NetworkOutput, top_k: int, *, logits: bool = False) -> TopKOutput:
        """Return the `top_k` best classes of each image; attention and relevance are passed on, logits if asked for."""
        scores = self.scores(output.logits)
        # A row with one NaN is all NaN after the softmax; a sigmoid keeps it in its place.
        finite = scores.isfinite().all(dim=-1)
        found = output.logits.float() if logits else None
        return TopKOutput(*scores.topk(top_k, dim=-1), finite, output.attention, output.relevance, found)


def pack(output: TopKOutput) -> Tensor:
    """Join an output without logits on its device: int32 [B, 2k + 1 + layers*heads*N + N]; indices are below 2^31.

        [ scores: k float32 | indices: k int32 | finite: 1 | attention: layers * heads * N float32 | relevance: N ]

    Floats keep their bits (they are viewed as int32, never converted), so that what is unpacked is what was packed.
    """
    parts = [output.scores.view(torch.int32), output.indices.int(), output.finite.int().unsqueeze(1)]
    if output.attention is not None:
        parts.append(output.attention.flatten(1).view(torch.int32))
    if output.relevance is not None:
        parts.append(output.relevance.view(torch.int32))
    return torch.cat(parts, dim=1)


def unpack(packed: Tensor, *, top_k: int, layers: int, heads: int, relevance: int = 0) -> TopKOutput:
    """Split a packed output on the host into tensors that keep nothing of its memory.

    Args:
        layers: of attention rows; 0 have no attention.
        relevance: columns of it; 0 have none.
    """
    ends = (top_k, 2 * top_k, 2 * top_k + 1, packed.shape[1] - relevance)
    scores, indices, finite, attention, found = packed.tensor_split(ends, dim=1)
    return TopKOutput(
        scores.view(torch.float32).clone(),
        indices.long(),
        finite[:, 0] != 0,
        attention.reshape(len(packed), layers, heads, -1).view(torch.float32).clone() if layers else None,
        found.view(torch.float32).clone() if relevance else None,
    )
