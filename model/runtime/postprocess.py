"""Postprocessing of logits to the best classes, the same on every device, and their one copy to the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from model.checkpoint import Checkpoint
from model.network.vit import ViTOutput


class TopKOutput(NamedTuple):
    """The best classes of a batch.

    Attributes:
        scores: float32 [B, k], highest first.
        indices: int64 [B, k].
        finite: bool [B], whether all scores of the image are finite.
        attention: float32 [B, layers, heads, N]; None if no layer was asked for.
    """

    scores: Tensor
    indices: Tensor
    finite: Tensor
    attention: Tensor | None


class Postprocess:
    """Turns logits into the top-k scores, on whichever device they are, as the checkpoint says."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._temperature = checkpoint.temperature
        self._independent = checkpoint.multi_label or checkpoint.config.num_classes == 1

    def scores(self, logits: Tensor) -> Tensor:
        """Return the score of each class, float32 [B, K], 0...1, from logits [B, K]."""
        logits = logits.float() / self._temperature
        return logits.sigmoid() if self._independent else logits.softmax(dim=-1)

    def __call__(self, output: ViTOutput, top_k: int) -> TopKOutput:
        """Return the `top_k` best classes of each image; the attention rows are passed on."""
        scores = self.scores(output.logits)
        # A row with one NaN is all NaN after the softmax; a sigmoid keeps it in its place.
        finite = scores.isfinite().all(dim=-1)
        return TopKOutput(*scores.topk(top_k, dim=-1), finite, output.attention)


def pack(output: TopKOutput) -> Tensor:
    """Join an output on its device: int32 [B, 2k + 1 + layers*heads*N]; indices must be below 2^31.

        [ scores: k float32 | indices: k int32 | finite: 1 | attention: layers * heads * N float32 ]

    Floats keep their bits (they are viewed as int32, never converted), so that what is unpacked is what was packed.
    """
    parts = [output.scores.view(torch.int32), output.indices.int(), output.finite.int().unsqueeze(1)]
    if output.attention is not None:
        parts.append(output.attention.flatten(1).view(torch.int32))
    return torch.cat(parts, dim=1)


def unpack(packed: Tensor, *, top_k: int, layers: int, heads: int) -> TopKOutput:
    """Split a packed output on the host into tensors that keep nothing of its memory; 0 layers have no attention."""
    scores, indices, finite, attention = packed.tensor_split((top_k, 2 * top_k, 2 * top_k + 1), dim=1)
    return TopKOutput(
        scores.view(torch.float32).clone(),
        indices.long(),
        finite[:, 0] != 0,
        attention.reshape(len(packed), layers, heads, -1).view(torch.float32).clone() if layers else None,
    )
