"""The network's pass over normalised pixels, and postprocessing of its logits, the same on every device.

What is made on a device comes to the host in one piece, beside logits and embeddings where these are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from model.checkpoint import Checkpoint
from model.config import NetworkConfig, ViTConfig
from model.explanation.folded_weights import FoldedWeights
from model.explanation.relevance import KEPT, token_relevance
from model.network.library import Classifier
from model.network.vit import VisionTransformer
from model.runtime.batches import BatchOutputs, BatchRequest

_TINY: Final = 1e-30
"""What is divided by at least: all logits, or all scores, may be equal."""


def run_network(
    model: Classifier, pixels: Tensor, request: BatchRequest, folded: FoldedWeights | None = None
) -> BatchOutputs:
    """Return the output of a model for normalised pixels [B, C, H, W]; see `Postprocess` for the rest.

    Args:
        folded: see `token_relevance`.
    """
    output = model(pixels, request.layers, KEPT if request.relevance else 0, request.all_tokens)
    relevance = None
    if request.relevance:
        assert isinstance(model, VisionTransformer), "of others no map is asked for: see `parse_maps`"
        with one_thread(pixels.device):
            relevance = token_relevance(model, output, weights=folded)
    return BatchOutputs(output.logits, output.attention, relevance, **output.embeddings)


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


class Postprocess:
    """Turns logits into the top-k scores, on whichever device they are, as the checkpoint says."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._temperature = checkpoint.temperature
        config = checkpoint.config
        is_compared = isinstance(config, ViTConfig) and config.normalized_head
        self._independent = checkpoint.multi_label or (config.num_classes == 1 and not is_compared)

    def scores(self, logits: Tensor) -> Tensor:
        """Return the score of each class, float32 [B, K], 0...1, from logits [B, K]."""
        logits = logits.float() / self._temperature
        return logits.sigmoid() if self._independent else logits.softmax(dim=-1)

    def best_evidence(self, scores: Tensor) -> Tensor:
        """Return the evidence of each image's best class, float32 [B], of its score: 1 unless classes are independent.

        Args:
            scores: float32 [B].
        """
        return scores if self._independent else torch.ones_like(scores)

    def evidence(self, logits: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the score of one class of each image, and how much speaks for it on a scale common to its classes.

        Where scores are independent of each other, the evidence is the score. Else it is how far the class's logit
        lies above the mean of all logits, relative to the best class's, squared; or the class's score relative to the
        best one's where that is more. So of two classes that share the score, each has the whole evidence, even where
        there is no third to be compared with. It does not depend on a constant that is added to all logits.

        Args:
            logits: [B, K].
            classes: int64 [B].

        Returns:
            float32 [B], 0...1, twice: the evidence of the best class is 1 unless scores are independent.
        """
        scores, column = self.scores(logits), classes.unsqueeze(1)
        score = scores.gather(1, column).squeeze(1)
        if self._independent:
            return score, score
        logits = logits.double()
        best, mean = logits.amax(dim=1), logits.mean(dim=1)
        above = (logits.gather(1, column).squeeze(1) - mean).clamp_min(0) / (best - mean).clamp_min(_TINY)
        relative = score / scores.amax(dim=1).clamp_min(_TINY)
        return score, torch.maximum(above.square().float(), relative).clamp(0, 1)

    def __call__(self, output: BatchOutputs, top_k: int) -> BatchOutputs:
        """Return the output of a network with the `top_k` best classes of each image."""
        assert output.logits is not None
        scores = self.scores(output.logits)
        # A row with one NaN is all NaN after the softmax; a sigmoid keeps it in its place.
        finite = scores.isfinite().all(dim=-1)
        best = scores.topk(top_k, dim=-1)
        return output._replace(scores=best.values, indices=best.indices, finite=finite)


_PACKED: Final = {
    "scores": torch.float32,
    "indices": torch.int32,  # below 2^31
    "finite": torch.int32,
    "attention": torch.float32,
    "relevance": torch.float32,
}
"""What is packed, in this order where it is there. The rest is `BatchRequest.beside`."""


def pack(outputs: BatchOutputs) -> Tensor:
    """Join outputs on their device: int32 [B, width], what is `beside` left out.

    Floats keep their bits (they are viewed as int32, never converted), so that what is unpacked is what was packed.
    """
    parts = [(getattr(outputs, name), dtype) for name, dtype in _PACKED.items()]
    columns = [part.to(dtype).view(torch.int32).reshape(len(part), -1) for part, dtype in parts if part is not None]
    return torch.cat(columns, dim=1)


def beside(outputs: BatchOutputs) -> dict[str, Tensor]:
    """Return the outputs that are not packed, by name."""
    return {name: tensor for name, tensor in outputs.tensors().items() if name not in _PACKED}


def unpack(packed: Tensor, request: BatchRequest, config: NetworkConfig) -> BatchOutputs:
    """Split what `pack` joined into tensors that keep nothing of its memory."""
    shapes: dict[str, tuple[int, ...]] = {"scores": (request.top_k,), "indices": (request.top_k,), "finite": ()}
    if request.layers and isinstance(config, ViTConfig):
        shapes["attention"] = len(request.layers), config.heads, config.tokens
    if request.relevance and isinstance(config, ViTConfig):
        shapes["relevance"] = (config.tokens,)
    parts = torch.split(packed, [math.prod(shape) for shape in shapes.values()], dim=1)
    tensors = {
        name: part.view(_PACKED[name]).reshape(len(packed), *shape).clone()
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
    return BatchOutputs.of(tensors | {"indices": tensors["indices"].long(), "finite": tensors["finite"] != 0})
