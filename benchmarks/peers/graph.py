"""vitserve's graph of a model as a file, for peers with OpenVINO: `python -m benchmarks.peers.graph MODEL_FOLDER`.

It is made by vitserve's own conversion, normalisation included, for batches of any size. It gives the logits alone:
the attention row of the last layer, which vitserve's own graph gives too, no peer needs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.common import GRAPH


def ensure(folder: Path) -> Path:
    """The graph's file in the folder of a model, made if absent."""
    file = folder / GRAPH
    if not file.exists():
        import openvino  # noqa: PLC0415  an optional package
        import torch  # noqa: PLC0415  it takes seconds

        from model.checkpoint import load_checkpoint  # noqa: PLC0415
        from model.runtime.openvino.tracing import convert  # noqa: PLC0415
        from model.runtime.torch_pass import Normalise  # noqa: PLC0415

        checkpoint = load_checkpoint(str(folder))
        network = checkpoint.build().eval()

        class Logits(torch.nn.Module):
            """Pictures uint8 [B, H, W, C] to logits."""

            def __init__(self) -> None:
                super().__init__()
                self.network, self.normalise = network, Normalise(checkpoint.preprocess)

            def forward(self, images: torch.Tensor) -> torch.Tensor:
                """Compute a batch."""
                logits: torch.Tensor = self.network(self.normalise(images)).logits
                return logits

        rows, columns = checkpoint.config.image_size
        graph = convert(Logits(), torch.zeros((2, rows, columns, 3), dtype=torch.uint8))
        openvino.save_model(graph, file, compress_to_fp16=False)
    return file


if __name__ == "__main__":
    print(ensure(Path(sys.argv[1])))
