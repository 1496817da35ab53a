"""The network's pass in torch over normalised pixels, and how its outputs come from a device to the host.

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
from model.runtime.batches import BatchOutputs, BatchRequest, HostOutputs
from model.runtime.scores import has_independent_scores


def run_network(
    model: Classifier, pixels: Tensor, request: BatchRequest, folded: FoldedWeights | None = None
) -> BatchOutputs[Tensor]:
    """Return the output of a model for normalised pixels [B, C, H, W]; see `Scores` for the rest.

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


def on_host(outputs: BatchOutputs[Tensor], count: int) -> HostOutputs:
    """Return the outputs of the first images as arrays, floats as float32."""
    values = {name: tensor[:count] for name, tensor in outputs.tensors().items()}
    return BatchOutputs.of(
        {name: (each.float() if each.is_floating_point() else each).cpu().numpy() for name, each in values.items()}
    )


class TopK:
    """Turns logits into the top-k scores on a device, as `Scores` does on the host."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._temperature, self._independent = checkpoint.temperature, has_independent_scores(checkpoint)

    def __call__(self, output: BatchOutputs[Tensor], top_k: int) -> BatchOutputs[Tensor]:
        """Return the output of a network with the `top_k` best classes of each image."""
        assert output.logits is not None
        logits = output.logits.float() / self._temperature
        scores = logits.sigmoid() if self._independent else logits.softmax(dim=-1)
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


def pack(outputs: BatchOutputs[Tensor]) -> Tensor:
    """Join outputs on their device: int32 [B, width], what is `beside` left out.

    Floats keep their bits (they are viewed as int32, never converted), so that what is unpacked is what was packed.
    """
    parts = [(getattr(outputs, name), dtype) for name, dtype in _PACKED.items()]
    columns = [part.to(dtype).view(torch.int32).reshape(len(part), -1) for part, dtype in parts if part is not None]
    return torch.cat(columns, dim=1)


def beside(outputs: BatchOutputs[Tensor]) -> dict[str, Tensor]:
    """Return the outputs that are not packed, by name."""
    return {name: tensor for name, tensor in outputs.tensors().items() if name not in _PACKED}


def unpack(packed: Tensor, request: BatchRequest, config: NetworkConfig) -> BatchOutputs[Tensor]:
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
