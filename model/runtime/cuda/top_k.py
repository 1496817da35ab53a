"""The top-k scores on a device, by the rule of `model.heads.Head.best`."""

from __future__ import annotations

from torch import Tensor

from model.heads import Head
from model.runtime.backend import BatchOutputs


def with_best(outputs: BatchOutputs[Tensor], head: Head, top_k: int) -> BatchOutputs[Tensor]:
    """Return the outputs of a network with the `top_k` best classes of each image."""
    assert outputs.logits is not None
    logits = outputs.logits.float()
    scaled = logits / head.temperature
    scores = scaled.sigmoid() if head.independent else scaled.softmax(dim=-1)
    # A row with one NaN is all NaN after the softmax; a sigmoid keeps it in its place.
    finite = scores.isfinite().all(dim=-1)
    indices = logits.topk(top_k, dim=-1).indices  # of saturated sigmoids several are 1
    return outputs._replace(scores=scores.gather(1, indices), indices=indices, finite=finite)
