"""Batches on the CPU are computed in pieces of few sizes, each of which is tried before the first request."""

from __future__ import annotations

import numpy as np
import pytest

from model.outputs import MapRequest, RequestedOutputs
from model.runtime import predictor as predictor_module
from model.runtime.batches import BatchOutputs, BatchRequest, HostOutputs, compute_in_pieces, piece_sizes, sizes_in_use
from model.runtime.predictor import Predictor
from model.runtime.torch_cpu import TorchCpu
from tests.model.runtime.predictions import predict
from tests.model.runtime.test_predictor import make_checkpoint, make_images


def test_pieces_add_up_and_have_few_sizes() -> None:
    used = set()
    for count in range(1, 129):
        sizes = piece_sizes(count)
        assert sum(sizes) == count
        used.update(sizes)
    assert sorted(used) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 48, 64, 96, 128]
    assert sorted(used, reverse=True) == sizes_in_use(128)
    assert [piece_sizes(count) for count in (1, 8, 9, 16, 23, 31)] == [[1], [8], [8, 1], [16], [16, 7], [24, 7]]


@pytest.mark.parametrize(
    ("count", "pieces"), [(1, [1]), (5, [4, 1]), (7, [6, 1]), (8, [8]), (23, [8, 8, 6, 1]), (32, [8] * 4)]
)
def test_pieces_of_sizes_that_are_given(count: int, pieces: list[int]) -> None:
    assert piece_sizes(count, (1, 2, 3, 4, 6, 8)) == pieces


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
    assert seen == [16, 3]
    assert output.logits is not None
    assert output.logits[:, 0].tolist() == list(range(19))
    if layers:
        assert output.attention is not None
        assert output.attention.shape == (19, 2, 3, 4)
        assert output.attention[:, 1, 2, 3].tolist() == list(range(19))
    else:
        assert output.attention is None


def test_torch_launches_no_other_sizes_and_has_tried_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Predictor(make_checkpoint(), device="cpu", compile_mode="off", dtype="float32", max_batch=16)
    images = make_images(16)
    alone = [predict(made, images[index : index + 1], top_k=5).scores[0] for index in range(16)]
    launched: list[int] = []
    network = made._backend._model  # type: ignore[attr-defined]
    network.register_forward_pre_hook(lambda _, arguments: launched.append(len(arguments[0])))
    made.warm_up()
    assert set(launched) == {1, 2, 3, 4, 5, 6, 7, 8, 16}
    tried = set(launched)
    for count in range(1, 17):
        launched.clear()
        found = predict(made, images[:count], top_k=5)
        assert set(launched) <= tried
        np.testing.assert_allclose(found.scores, alone[:count], atol=1e-5)


def test_warm_up_tries_no_further_size_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []
    monkeypatch.setattr(TorchCpu, "fill_caches", lambda _, size: tried.append(size))
    moments = iter([0.0, 0.0, 1.9, 2.0])
    monkeypatch.setattr(predictor_module, "monotonic", lambda: next(moments))
    caplog.set_level("INFO")
    Predictor(make_checkpoint(), device="cpu", compile_mode="off", max_batch=16).warm_up()
    assert tried == [16, 8]
    assert "batches of 7 and less" in caplog.text


def test_a_batch_is_computed_for_all_that_is_asked_of_any_image() -> None:
    row, best, of_class = MapRequest.row(3, 1), MapRequest("relevance"), MapRequest("gae", 2)
    config = make_checkpoint().config
    assert BatchRequest.of([RequestedOutputs(2)], config) == BatchRequest(2)
    requests = [RequestedOutputs(1, row), RequestedOutputs(5, of_class), RequestedOutputs(3, MapRequest.row(0))]
    assert BatchRequest.of(requests, config) == BatchRequest(5, logits=True, layers=(0, 3)), "for the class's evidence"
    assert BatchRequest.of([RequestedOutputs(1, MapRequest("gae"))], config) == BatchRequest(1), "of the best class"
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
