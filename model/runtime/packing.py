"""The top-k output of a batch as one integer tensor, so that it leaves the device in one copy.

    [ scores: k float32 | indices: k int32 | finite: 1 | attention: layers * heads * N float32 ]

Floats keep their bits (they are viewed as int32, never converted), so that what is unpacked is what was packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.runtime.postprocess import TopKOutput


def pack(output: TopKOutput) -> Tensor:
    """Join an output on its device: int32 [B, 2k + 1 + layers*heads*N]; indices must be below 2^31."""
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
