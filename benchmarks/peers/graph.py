"""vitserve's graph of a model as a file, for peers with OpenVINO.

It is made by vitserve's own conversion, normalisation included, for batches of any size. It gives the logits alone:
the attention row of the last layer, which vitserve's own graph gives too, no peer needs.
"""

from pathlib import Path

import openvino
import torch
from torch import Tensor

from benchmarks.peers.common import GRAPH
from model.checkpoint import load_checkpoint
from model.runtime.openvino.tracing import convert
from model.runtime.torch_pass import Normalise


class _Logits(torch.nn.Module):
    def __init__(self, network: torch.nn.Module, normalise: torch.nn.Module) -> None:
        super().__init__()
        self.network, self.normalise = network, normalise

    def forward(self, images: Tensor) -> Tensor:
        """Pictures, uint8 [B, H, W, C], to logits."""
        logits: Tensor = self.network(self.normalise(images)).logits
        return logits


def ensure(folder: Path) -> None:
    """Write the graph's file into the folder of a model if it is absent."""
    if not (folder / GRAPH).exists():
        checkpoint = load_checkpoint(str(folder))
        network = _Logits(checkpoint.build().eval(), Normalise(checkpoint.preprocess))
        graph = convert(network, torch.zeros((2, *checkpoint.config.image_size, 3), dtype=torch.uint8))
        openvino.save_model(graph, folder / GRAPH, compress_to_fp16=False)
