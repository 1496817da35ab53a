"""A batch's whole answer as one integer tensor, so that it leaves the device in one copy.

    [ scores: k float32 | indices: k int32 | finite: 1 | attention: layers * heads * N float32 ]

Floats keep their bits (they are viewed as int32, never converted), so that what is unpacked is what was packed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Answer(NamedTuple):
    """Attributes:
    scores: float32 [B, k], highest first.
    indices: int64 [B, k].
    finite: bool [B].
    attention: float32 [B, layers, heads, N]; None if no layer was asked for.
    """

    scores: NDArray[np.float32]
    indices: NDArray[np.int64]
    finite: NDArray[np.bool_]
    attention: NDArray[np.float32] | None


def pack(scores: Tensor, indices: Tensor, finite: Tensor, attention: Tensor | None) -> Tensor:
    """Join the parts of an answer on their device.

    Args:
        scores: float32 [B, k].
        indices: int64 [B, k], below 2^31.
        finite: bool [B].
        attention: float32 [B, layers, heads, N], or None.

    Returns:
        int32 [B, 2k + 1 + layers*heads*N].
    """
    parts = [scores.view(torch.int32), indices.int(), finite.int().unsqueeze(1)]
    if attention is not None:
        parts.append(attention.flatten(1).view(torch.int32))
    return torch.cat(parts, dim=1)


def unpack(packed: NDArray[np.int32], *, top_k: int, layers: int, heads: int) -> Answer:
    """The parts again, as arrays of their own: nothing of `packed` is kept.

    Args:
        packed: what `pack` gave, on the host.
        top_k: its k.
        layers, heads: of its attention; 0 layers: there is none.
    """
    scores, indices, finite, attention = np.split(packed, (top_k, 2 * top_k, 2 * top_k + 1), axis=1)
    return Answer(
        scores.view(np.float32).copy(),
        indices.astype(np.int64),
        finite[:, 0] != 0,
        attention.view(np.float32).reshape(len(packed), layers, heads, -1).copy() if layers else None,
    )
