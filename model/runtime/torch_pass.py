"""The network's pass in torch, from uint8 pixels to its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from model.config import PreprocessConfig
from model.explanation.folded_weights import FoldedWeights
from model.explanation.relevance import KEPT, token_relevance
from model.network.library import Classifier
from model.network.vit import VisionTransformer
from model.runtime.batches import BatchOutputs, BatchRequest, HostOutputs


class Normalise(nn.Module):
    """Computes (x/255 - mean) / std in float32, as one multiplication and addition, and gives it in `dtype`."""

    scale: Tensor
    shift: Tensor

    def __init__(self, preprocess: PreprocessConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        std = torch.tensor(preprocess.std, dtype=torch.float64)
        mean = torch.tensor(preprocess.mean, dtype=torch.float64)
        self.register_buffer("scale", (1 / (255 * std)).float().reshape(1, -1, 1, 1))
        self.register_buffer("shift", (-mean / std).float().reshape(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 [B, H, W, C] to the dtype, [B, C, H, W]."""
        pixels = images.permute(0, 3, 1, 2).float()
        return (pixels * self.scale + self.shift).to(self.dtype)


def run_network(
    model: Classifier, pixels: Tensor, request: BatchRequest, folded: FoldedWeights | None = None
) -> BatchOutputs[Tensor]:
    """Return the output of a model for normalised pixels [B, C, H, W], without scores.

    Args:
        folded: see `token_relevance`.
    """
    output = model(pixels, request.layers, KEPT if request.relevance else 0, request.all_tokens)
    relevance = None
    if request.relevance:
        assert isinstance(model, VisionTransformer), "of others no map is asked for: see `parse_maps`"
        assert folded is not None
        with one_thread(pixels.device):
            relevance = token_relevance(model, output, folded)
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


def on_host(outputs: BatchOutputs[Tensor]) -> HostOutputs:
    """Return outputs as arrays, floats as float32."""
    floats = {name: each.float() if each.is_floating_point() else each for name, each in outputs.tensors().items()}
    return BatchOutputs.of({name: each.cpu().numpy() for name, each in floats.items()})
