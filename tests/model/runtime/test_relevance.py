"""The relevance of the best class, out of the classification's own pass."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import Checkpoint
from model.config import PreprocessConfig
from model.errors import DeviceError
from model.explanation.methods import explain
from model.outputs import MapRequest
from model.runtime.backend import HostOutputs
from model.runtime.openvino import network, tracing
from model.runtime.openvino.backend import OpenVino, unsupported_reason
from model.runtime.openvino.network import OpenVinoNetwork
from model.runtime.predictor import Predictor
from model.runtime.torch_backend import TorchBackend, TorchCpu
from model.runtime.torch_pass import Normalise
from tests.model.explanation.test_methods import FAMILIES, model_of
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.predictions import MODES, Predictions, predict

RELEVANCE = MapRequest("relevance")
MIXED = [RELEVANCE, None, MapRequest.row(0, 1), RELEVANCE, MapRequest.row(3, "max")]
CPU = torch.device("cpu")
needs_openvino = pytest.mark.skipif(unsupported_reason("float32") is not None, reason="no OpenVINO here")
SIZES: dict[str, Any] = {"image_size": (48, 56), "depth": 4}


def checkpoint_of(family: str) -> Checkpoint:
    model = model_of(family, **SIZES)
    size = model.config.image_size
    preprocess = PreprocessConfig(
        size=size, resize="squash", resize_size=size, interpolation="bicubic", mean=(0.5,) * 3, std=(0.25,) * 3
    )
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return Checkpoint("test", "test", "vitserve", "vit", model.config, preprocess, tuple("abcde"), tensors)


def images_for(predictor: Predictor, count: int = 5) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, (count, *predictor.config.image_size, 3), dtype=np.uint8)


def made(family: str, backend: str = "torch", **options: Any) -> Predictor:
    return Predictor(
        checkpoint_of(family), device="cpu", dtype="float32", compile_mode=MODES[backend], threads=1, **options
    )


def require_explanation(predictor: Predictor, images: np.ndarray, place: int, found: Predictions) -> None:
    """The image's map is the one that an explanation of its best class alone gives."""
    pixels = Normalise(predictor.checkpoint.preprocess)(torch.from_numpy(images))
    best, checkpoint = int(found.indices[place, 0]), predictor.checkpoint
    assert isinstance(checkpoint, Checkpoint)
    expected, kept = explain(checkpoint.build(), pixels[[place]], torch.tensor([best]), RELEVANCE)
    got = found.maps[place]
    assert got.request == MapRequest("relevance", best)
    np.testing.assert_allclose(got.values, expected[0].numpy(), atol=1e-5)
    assert got.kept_mass == pytest.approx(kept.item(), abs=1e-5)
    assert got.score == pytest.approx(float(found.scores[place, 0]))
    assert got.evidence == 1
    assert got.values.max() > 1.5 / got.values.size or got.kept_mass == 0, "a map is even where nothing is found alone"


@pytest.fixture
def no_explanations(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a pass of its own")

    monkeypatch.setattr(TorchBackend, "explain", refuse)


def require_mixed(predictor: Predictor, rows_of: Predictor) -> None:
    """A batch of all kinds of requests gives each image what it asks for."""
    images = images_for(predictor)
    found = predict(predictor, images, top_k=2, maps=MIXED)
    rows = predict(rows_of, images, top_k=2, maps=[None, None, MIXED[2], None, MIXED[4]])
    np.testing.assert_array_equal(found.indices, rows.indices)
    for place in (0, 3):
        require_explanation(predictor, images, place, found)
    assert found.maps[1] is None
    for place in (2, 4):
        got, wanted = found.maps[place], rows.maps[place]
        assert got.request == wanted.request
        np.testing.assert_allclose(got.values, wanted.values, atol=1e-5)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "square"])
@pytest.mark.usefixtures("no_explanations")
def test_a_mixed_batch_needs_no_further_pass(family: str) -> None:
    predictor = made(family)
    require_mixed(predictor, predictor)


@pytest.mark.usefixtures("no_explanations")
def test_a_captured_graph_gives_it() -> None:
    ops = StandInOps()
    predictor = made("registers", "openvino", ops=ops, max_batch=8, streams=1)
    predictor.warm_up()
    images, replays = images_for(predictor, 3), ops.replays
    found = predict(predictor, images, top_k=1, maps=[None, RELEVANCE, RELEVANCE])
    assert ops.replays == replays + 1
    require_explanation(predictor, images, 1, found)
    require_explanation(predictor, images, 2, found)
    replays = ops.replays
    require_mixed(predictor, made("registers"))
    assert ops.replays == replays + 3, "images with nothing, with the last row and with relevance; another row has none"


def test_of_a_named_class_it_is_an_explanation() -> None:
    assert MapRequest("relevance", 0).needs_pass
    assert not RELEVANCE.needs_pass


@needs_openvino
@pytest.mark.timeout(120)  # graphs are compiled
class TestOpenVino:
    @pytest.mark.parametrize(
        "family", ["registers", "distilled", "inner_norms", "beit", "cls_mean", "max", "attention", "rotary_learned"]
    )
    @pytest.mark.usefixtures("no_explanations")
    def test_its_graph_gives_it(self, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        if family != "registers":  # which has a graph for each of some batch sizes; others have one for any
            monkeypatch.setattr(network, "_FIXED_BYTES", 1)
        predictor = made(family, "openvino")
        backend = predictor._backend
        assert isinstance(backend, OpenVino)
        backend.prepare()
        require_mixed(predictor, predictor)  # with rows of an early layer, which torch computes
        monkeypatch.setattr(TorchCpu, "predict", lambda *_, **__: pytest.fail("torch computed it"))
        images = images_for(predictor, 3)
        maps = [RELEVANCE, None, RELEVANCE if backend._network.request.layers == () else MapRequest.row(3)]
        found = predict(predictor, images, top_k=1, maps=maps)
        require_explanation(predictor, images, 0, found)

    def test_torch_computes_it_until_the_graph_is_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(network, "_FIXED_BYTES", 1)
        predictor = made("plain", "openvino")
        go, calls = threading.Event(), []

        def slow() -> OpenVinoNetwork:
            calls.append(1)
            go.wait(30)
            raise DeviceError("it cannot be made")

        monkeypatch.setattr(predictor._backend, "_with_relevance", slow)
        images = images_for(predictor, 2)
        for _ in range(2):
            require_explanation(predictor, images, 0, predict(predictor, images, top_k=1, maps=[RELEVANCE, None]))
        go.set()
        for thread in threading.enumerate():
            if thread.name == "openvino-prepare":
                thread.join()
        require_explanation(predictor, images, 1, predict(predictor, images, top_k=1, maps=[None, RELEVANCE]))
        assert len(calls) == 1, "it is made once"

    def test_a_graph_that_gives_another_relevance_is_not_used(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(network, "_FIXED_BYTES", 1)
        predictor = made("plain", "openvino")
        backend, named = predictor._backend, OpenVinoNetwork._named
        assert isinstance(backend, OpenVino)

        def wrong(self: OpenVinoNetwork, outputs: Sequence[np.ndarray]) -> HostOutputs:
            output = named(self, outputs)
            return output if output.relevance is None else output._replace(relevance=np.flip(output.relevance, -1))

        monkeypatch.setattr(OpenVinoNetwork, "_named", wrong)
        with caplog.at_level(logging.WARNING):
            backend.prepare()
        assert "torch computes relevance: OpenVINO's relevance of an image are" in caplog.text
        images = images_for(predictor, 2)
        require_explanation(predictor, images, 1, predict(predictor, images, top_k=1, maps=[None, RELEVANCE]))

    def test_its_graphs_share_the_checkpoints_weights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(network, "_FIXED_BYTES", 1)
        predictor = made("plain", "openvino")
        traced: list[torch.nn.Parameter] = []

        def spy(module: torch.nn.Module, example: torch.Tensor) -> None:
            traced.extend(module.get_submodule("model").parameters())
            raise RuntimeError("seen")

        monkeypatch.setattr(tracing, "convert", spy)
        backend = predictor._backend
        assert isinstance(backend, OpenVino)
        backend.prepare()
        assert isinstance(predictor.checkpoint, Checkpoint)
        shared = {tensor.data_ptr() for tensor in predictor.checkpoint.tensors.values()}
        assert {parameter.data_ptr() for parameter in traced} <= shared
        assert len(traced) > 10
