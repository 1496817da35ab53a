"""Batches on the CPU are computed in pieces of few sizes, each of which is tried before the first request."""

from __future__ import annotations

import numpy as np
import pytest

from model.outputs import MapRequest, RequestedOutputs
from model.runtime.backend import BatchOutputs, BatchRequest, HostOutputs, compute_in_pieces
from tests.model.runtime.test_predictor import make_checkpoint


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


def test_a_batch_is_computed_for_all_that_is_asked_of_any_image() -> None:
    row, best, of_class = MapRequest.row(3, 1), MapRequest("relevance"), MapRequest("gae", 2)
    config = make_checkpoint().config
    assert BatchRequest.of([RequestedOutputs(2)], config) == BatchRequest(2)
    requests = [RequestedOutputs(1, row), RequestedOutputs(5, of_class), RequestedOutputs(3, MapRequest.row(0))]
    assert BatchRequest.of(requests, config) == BatchRequest(5, logits=True, layers=(0, 3)), "for the class's evidence"
    assert BatchRequest.of([RequestedOutputs(1, MapRequest("rollout"))], config) == BatchRequest(1), "of no class"
    assert BatchRequest.of([RequestedOutputs(1, row, logits=True), RequestedOutputs(1, best), *requests], config) == (
        BatchRequest(5, logits=True, layers=(0, 3), relevance=True)
    )
    assert BatchRequest(5, logits=True, layers=(3,)).of_network == BatchRequest(layers=(3,))


def test_a_network_covers_what_it_computes() -> None:
    last, both = BatchRequest(layers=(3,)), BatchRequest(layers=(3,), relevance=True)
    assert last.covers(BatchRequest(9, logits=True, layers=(3,)))
    assert last.covers(BatchRequest(2))
    assert both.covers(BatchRequest(2, relevance=True))
    assert not last.covers(BatchRequest(2, layers=(1,)))
    assert not both.covers(BatchRequest(2, layers=(1, 3)))
    assert not last.covers(BatchRequest(2, relevance=True))
