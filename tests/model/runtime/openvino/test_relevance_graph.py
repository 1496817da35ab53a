"""OpenVINO's graphs of relevance and of transfer features."""

import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import Checkpoint
from model.errors import DeviceError
from model.outputs import (
    EmbeddingRequest,
    MapRequest,
    RequestedOutputs,
)
from model.runtime import build
from model.runtime.batch_request import BatchRequest, GraphKind
from model.runtime.openvino import tracing
from model.runtime.openvino.backend import OpenVino
from model.runtime.openvino.network import NetworkGraph, OpenVinoNetwork, unsupported_reason
from model.runtime.torch_backend import TorchCpu, TorchOptions
from tests.model.runtime.predictions import predict
from tests.model.runtime.relevance_maps import (
    RELEVANCE,
    family_predictor,
    images_for,
    require_explanation,
    require_mixed,
)
from tests.support.openvino_graphs import use_a_graph_a_size

pytestmark = [
    pytest.mark.skipif(unsupported_reason("float32") is not None, reason="no OpenVINO here"),
    pytest.mark.timeout(120),  # graphs are compiled
]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("registers", {}),
        ("distilled", {"rotary": {"learned": True}}),
        ("inner_norms", {"pool": "cls_mean"}),
        ("beit", {"pool": "max"}),
        ("attention", {}),
    ],
)
@pytest.mark.usefixtures("no_explanations")
def test_a_graph_gives_relevance(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "registers":
        use_a_graph_a_size(monkeypatch)
    predictor = family_predictor(family, "openvino", changes)
    backend = predictor._backend
    assert isinstance(backend, OpenVino)
    backend.prepare("relevance")
    require_mixed(predictor, predictor)  # with rows of an early layer, which torch computes
    monkeypatch.setattr(TorchCpu, "predict", lambda *_, **__: pytest.fail("torch computed it"))
    images = images_for(predictor, 3)
    maps = [
        RELEVANCE,
        None,
        RELEVANCE if backend._network.request.layers == () else MapRequest.attention_row(1),
    ]
    found = predict(predictor, images, top_k=1, maps=maps)
    require_explanation(predictor, images, 0, found)


@pytest.mark.parametrize("family", ["registers", "cls_mean", "attention", "relative_without_cls"])
def test_a_graph_gives_transfer_features(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if family == "registers":
        use_a_graph_a_size(monkeypatch)
    predictor = family_predictor(family, "openvino")
    plain = family_predictor(family)
    images = images_for(predictor, 3)
    row = (
        MapRequest.attention_row(1) if BatchRequest.of_graph("plain", plain.config).layers else None
    )
    asked = [
        RequestedOutputs(2, row, embedding=EmbeddingRequest("transfer")),
        RequestedOutputs(2),
    ]
    expected: list[Any] = plain.predict(images, [asked[0], asked[1], asked[0]])
    backend = predictor._backend
    assert isinstance(backend, OpenVino)
    backend.prepare("transfer")
    monkeypatch.setattr(TorchCpu, "predict", lambda *_, **__: pytest.fail("torch computed it"))
    found: list[Any] = predictor.predict(images, [asked[0], asked[1], asked[0]])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-4)
        if theirs.embedding is not None:
            np.testing.assert_allclose(ours.embedding, theirs.embedding, rtol=1e-3, atol=1e-3)


def test_torch_computes_before_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = family_predictor("plain", "openvino")
    go = threading.Event()
    calls = []

    def slow(*_: object, **__: object) -> OpenVinoNetwork:
        calls.append(1)
        go.wait(30)
        raise DeviceError("it cannot be made")

    monkeypatch.setattr(build, "traced_network", slow)
    images = images_for(predictor, 2)
    for _ in range(2):
        require_explanation(
            predictor, images, 0, predict(predictor, images, top_k=1, maps=[RELEVANCE, None])
        )
    go.set()
    for thread in threading.enumerate():
        if thread.name == "openvino-prepare":
            thread.join()
    require_explanation(
        predictor, images, 1, predict(predictor, images, top_k=1, maps=[None, RELEVANCE])
    )
    assert len(calls) == 1, "it is made once"


def test_a_wrong_graph_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    predictor = family_predictor("plain", "openvino")
    backend = predictor._backend
    trace = tracing.trace
    assert isinstance(backend, OpenVino)

    def with_other_reference(options: TorchOptions, kind: GraphKind) -> NetworkGraph:
        graph = trace(options, kind)
        other = np.flip(graph.reference["relevance"], -1)
        return graph._replace(reference=graph.reference | {"relevance": other})

    monkeypatch.setattr(tracing, "trace", with_other_reference)
    with caplog.at_level(logging.WARNING):
        backend.prepare("relevance")
    assert "torch computes relevance: OpenVINO's relevance of an image are" in caplog.text
    images = images_for(predictor, 2)
    require_explanation(
        predictor, images, 1, predict(predictor, images, top_k=1, maps=[None, RELEVANCE])
    )


def test_unfinished_graph_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    predictor = family_predictor("plain", "openvino")
    backend = predictor._backend
    assert isinstance(backend, OpenVino)

    def fail(*_: Any) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(tracing, "trace", fail)
    monkeypatch.setattr(threading, "main_thread", threading.Thread)  # one that is not alive
    with caplog.at_level(logging.WARNING):
        backend.prepare("relevance")

    assert caplog.text == ""


def test_graphs_share_the_models_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = family_predictor("plain", "openvino")
    traced: list[torch.nn.Parameter] = []

    def spy(module: torch.nn.Module, example: torch.Tensor) -> None:
        traced.extend(module.get_submodule("model").parameters())
        raise RuntimeError("seen")

    monkeypatch.setattr(tracing, "convert", spy)
    backend = predictor._backend
    assert isinstance(backend, OpenVino)
    backend.prepare("relevance")
    assert isinstance(predictor.checkpoint, Checkpoint)
    shared = {tensor.data_ptr() for tensor in predictor.checkpoint.tensors.values()}
    assert {parameter.data_ptr() for parameter in traced} <= shared
    assert len(traced) > 10
