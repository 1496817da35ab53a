"""Batches on the CPU are computed in pieces of few sizes, each of which is tried before the first request."""

from __future__ import annotations

import numpy as np
import pytest

from model.runtime.backend import BatchOutputs, HostOutputs, compute_in_pieces


@pytest.mark.parametrize("layers", [0, 2])
def test_the_pieces_outputs_are_joined_in_order(layers: int) -> None:
    images = np.arange(19, dtype=np.uint8).reshape(19, 1, 1, 1)
    seen: list[int] = []

    def compute(piece: np.ndarray) -> HostOutputs:
        seen.append(len(piece))
        logits = piece.reshape(-1, 1).astype(np.float32)
        rows = np.broadcast_to(logits.reshape(-1, 1, 1, 1), (len(piece), layers, 3, 4))
        return BatchOutputs(logits, rows if layers else None)

    output = compute_in_pieces(images, compute)
    assert seen == [8, 8, 2, 1]
    assert output.logits is not None
    assert output.logits[:, 0].tolist() == list(range(19))
    if layers:
        assert output.attention is not None
        assert output.attention.shape == (19, 2, 3, 4)
        assert output.attention[:, 1, 2, 3].tolist() == list(range(19))
    else:
        assert output.attention is None
