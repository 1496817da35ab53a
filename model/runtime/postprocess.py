"""From logits to the best classes, in the same way on every device."""

from __future__ import annotations

from typing import NamedTuple

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

    def __call__(self, output: ViTOutput, top_k: int) -> TopKOutput:
        """Return the `top_k` best classes of each image; the attention rows are passed on."""
        logits = output.logits.float() / self._temperature
        scores = logits.sigmoid() if self._independent else logits.softmax(dim=-1)
        # A row with one NaN is all NaN after the softmax; a sigmoid keeps it in its place.
        finite = scores.isfinite().all(dim=-1)
        return TopKOutput(*scores.topk(top_k, dim=-1), finite, output.attention)
