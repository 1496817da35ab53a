"""Several heads on one backbone answer as their models alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import Checkpoint
from model.checkpoint.checkpoint import backbone_and_head
from model.explanation.class_relevance import kept_for_transfer, transfer_relevance
from model.explanation.explain import explain
from model.explanation.maps import sharpened_maps
from model.heads import Head
from model.outputs import (
    EmbeddingRequest,
    MapRequest,
    Outputs,
    RequestedOutputs,
    embedding_width,
)
from model.runtime.backend import HostOutputs
from model.runtime.batch_request import BatchRequest
from model.runtime.predictor import Predictor
from model.runtime.torch_pass import Normalise
from tests.model.runtime.predictions import MODES
from tests.model.runtime.relevance_maps import (
    checkpoint_of,
    family_predictor,
    images_for,
)
from tests.needs import needs_methods

ASKED = RequestedOutputs(3, logits=True)


MAPS = [
    MapRequest("relevance"),
    MapRequest("relevance", 1),
    pytest.param(MapRequest("gae", 2), marks=needs_methods),
    pytest.param(MapRequest("gae"), marks=needs_methods),
    MapRequest.attention_row(1),
]


def with_head(checkpoint: Checkpoint, classes: int, seed: int, **changes: Any) -> Checkpoint:
    """Return the same backbone with another head."""
    generator = torch.Generator().manual_seed(seed)
    config = checkpoint.config.model_copy(update={"num_classes": classes})
    shapes = {
        "head.weight": (classes, checkpoint.tensors["head.weight"].shape[1]),
        "head.bias": (classes,),
    }
    tensors = dict(checkpoint.tensors)
    tensors |= {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    labels = tuple(f"{seed}-{index}" for index in range(classes))
    return replace(checkpoint, config=config, tensors=tensors, labels=labels, **changes)


def models_on(backbone: Checkpoint) -> dict[str, Checkpoint]:
    """Return heads with another number of classes, a temperature, sigmoids, or a single class."""
    return {
        "own": backbone,
        "seven": with_head(backbone, 7, 1, temperature=2.5),
        "sigmoids": with_head(backbone, 4, 2, multi_label=True),
        "one": with_head(backbone, 1, 3),
    }


def predictor_of(checkpoint: Checkpoint, mode: str = "torch") -> Predictor:
    return Predictor(
        checkpoint, device="cpu", dtype="float32", compile_mode=MODES[mode], threads=1, max_batch=8
    )


def sharing(models: dict[str, Checkpoint], mode: str = "torch") -> Predictor:
    """Return one predictor with all heads."""
    predictor = predictor_of(models["own"], mode)
    for name, checkpoint in models.items():
        key, head = backbone_and_head(checkpoint)
        assert key == backbone_and_head(models["own"])[0]
        assert head is not None
        predictor.heads[name] = predictor.own if name == "own" else head
    return predictor


def asked_alone(checkpoint: Checkpoint, images: np.ndarray, requested: RequestedOutputs) -> Any:
    """Return the outputs of a model in its own predictor."""
    [outputs] = predictor_of(checkpoint).predict(images, replace(requested, head_name=""))
    return outputs


def require_same(found: Outputs, alone: Outputs) -> None:
    for name in ("scores", "logits", "embedding"):
        ours = getattr(found, name)
        theirs = getattr(alone, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)
    assert found.indices.tolist() == alone.indices.tolist()
    assert (found.map is None) == (alone.map is None)
    if found.map is not None and alone.map is not None:
        assert found.map.request == alone.map.request
        np.testing.assert_allclose(found.map.values, alone.map.values, atol=1e-4)
        assert (found.map.score, found.map.evidence) == pytest.approx(
            (alone.map.score, alone.map.evidence), abs=1e-5
        )


def bounded(requested: RequestedOutputs, checkpoint: Checkpoint) -> RequestedOutputs:
    """Return requests of a model, which may have fewer classes."""
    classes = checkpoint.config.num_classes
    wanted = requested.map
    if wanted is not None and wanted.class_index is not None:
        wanted = replace(wanted, class_index=min(wanted.class_index, classes - 1))
    return replace(requested, top_k=min(requested.top_k, classes), map=wanted)


@pytest.mark.parametrize("mode", MODES)
def test_mixed_heads_answer_as_alone(mode: str) -> None:
    models = models_on(checkpoint_of("plain"))
    predictor = sharing(models, mode)
    images = images_for(predictor, 8)
    names = [*models, *models]
    requests = [bounded(replace(ASKED, head_name=name), models[name]) for name in names]
    requests[2] = replace(requests[2], embedding=EmbeddingRequest("mean", normalize=True))
    found = predictor.predict(images, requests)
    for place, name in enumerate(names):
        require_same(
            found[place], asked_alone(models[name], images[place : place + 1], requests[place])
        )


@pytest.mark.parametrize("family", ["plain", "cls_mean", "normalized"])
@pytest.mark.parametrize("wanted", MAPS, ids=str)
def test_any_head_has_the_maps_of_its_model(family: str, wanted: MapRequest) -> None:
    models = models_on(checkpoint_of(family))
    predictor = sharing(models)
    images = images_for(predictor, 4)
    requests = [
        bounded(replace(ASKED, head_name=name, map=wanted), checkpoint)
        for name, checkpoint in models.items()
    ]
    found = predictor.predict(images, requests)
    for place, checkpoint in enumerate(models.values()):
        require_same(
            found[place], asked_alone(checkpoint, images[place : place + 1], requests[place])
        )


def test_several_heads_share_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    models = models_on(checkpoint_of("plain"))
    predictor = sharing(models)
    images = images_for(predictor, 2)
    first, *others = (
        bounded(replace(ASKED, head_name=name), checkpoint) for name, checkpoint in models.items()
    )
    passes: list[int] = []
    predict = predictor._backend.predict

    def counted(images: np.ndarray, request: BatchRequest) -> HostOutputs:
        passes.append(len(images))
        return predict(images, request)

    monkeypatch.setattr(predictor._backend, "predict", counted)
    both, single = predictor.predict(images, [replace(first, more=tuple(others)), others[1]])
    assert passes == [2]
    assert (len(both.more), single.more) == (3, ())
    for outputs, checkpoint in zip((both, *both.more), models.values(), strict=True):
        require_same(outputs, asked_alone(checkpoint, images[:1], bounded(ASKED, checkpoint)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("label", [None, 1])
def test_another_heads_class_shares_the_pass(mode: str, label: int | None) -> None:
    models = models_on(checkpoint_of("plain"))
    predictor = sharing(models, mode)
    seven = predictor.heads["seven"]
    images = images_for(predictor, 3)
    own: Any = predictor.predict(images[:1], replace(ASKED, map=MapRequest("relevance")))[0]
    wanted = RequestedOutputs(1, MapRequest("relevance", label), embedding=EmbeddingRequest())
    brought = replace(wanted, map=MapRequest("relevance", label, classifier=seven.linear))
    backend: Any = predictor._backend
    network = backend.load_torch()._plain if hasattr(backend, "load_torch") else backend._plain
    passes: list[int] = []
    network.patch_embed.register_forward_hook(lambda _, given, output: passes.append(len(output)))
    requests = [
        replace(ASKED, map=MapRequest("relevance")),
        replace(wanted, head_name="seven"),
        brought,
    ]
    found: list[Any] = predictor.predict(images, requests)
    mixed, of_seven, of_caller = found
    assert passes in ([2], [1, 2])  # the checkpoint's head, in its own pass
    alone = asked_alone(models["seven"], images[1:2], wanted)
    require_same(of_seven, alone)
    alone = asked_alone(models["seven"], images[2:], wanted)
    np.testing.assert_allclose(of_caller.map.values, alone.map.values, atol=1e-4)
    assert of_caller.map.request == alone.map.request
    # Other heads do not change a bit of the first head's answer.
    for name in ("scores", "logits"):
        assert getattr(mixed, name).tobytes() == getattr(own, name).tobytes()
    assert mixed.map.values.tobytes() == own.map.values.tobytes()


@needs_methods
@pytest.mark.parametrize(
    ("family", "mode"),
    [*(("plain", mode) for mode in MODES), ("cls_mean", "torch"), ("attention", "torch")],
)
def test_a_map_begins_where_its_head_reads(family: str, mode: str) -> None:
    predictor = family_predictor(family, mode)
    images = images_for(predictor, 3)
    width = embedding_width(predictor.config, "transfer")
    weight = np.random.default_rng(3).standard_normal((2, width)).astype(np.float32)
    head = Head(("a", "b"), False, weight=weight, bias=np.zeros(2, np.float32), features="transfer")
    of_class = MapRequest("relevance", 1, classifier=head.linear)
    asked = RequestedOutputs(1, of_class, embedding=EmbeddingRequest("transfer"))
    of_row = RequestedOutputs(1, MapRequest("relevance"))
    found: list[Any] = predictor.predict(
        images, [asked, of_row, replace(asked, map=replace(of_class, method="gae"))]
    )
    checkpoint = predictor.checkpoint
    assert isinstance(checkpoint, Checkpoint)
    network = checkpoint.build()
    pixels = Normalise(checkpoint.preprocess)(torch.from_numpy(images))
    with torch.no_grad():
        output = network(pixels, keep=kept_for_transfer(network.config), transfer=True)
    features = output.embeddings["transfer"].numpy()
    np.testing.assert_allclose(found[0].embedding, features[0], rtol=1e-3, atol=1e-3)
    directions = np.stack([head.map_target(each, "relevance", 1)[1] for each in features])
    relevance = transfer_relevance(network, output, torch.from_numpy(directions)).numpy()
    expected, _ = sharpened_maps(relevance, network.config)
    np.testing.assert_allclose(found[0].map.values, expected[0], atol=1e-4)
    rows = torch.from_numpy(weight[[1]].repeat(3, axis=0))
    of_gae, _ = explain(network, pixels, rows, MapRequest("gae"), features="transfer")
    np.testing.assert_allclose(found[2].map.values, of_gae[2].numpy(), atol=1e-4)


def test_no_head_answers_for_a_missing_one() -> None:
    models = models_on(checkpoint_of("plain"))
    predictor = sharing(models)
    del predictor.heads["seven"]
    with pytest.raises(ValueError, match="no head 'seven'"):
        predictor.predict(images_for(predictor, 1), [replace(ASKED, head_name="seven")])


def keys(*checkpoints: Checkpoint) -> Sequence[str]:
    return [backbone_and_head(checkpoint)[0] for checkpoint in checkpoints]


def test_a_change_makes_another_backbone() -> None:
    one = checkpoint_of("plain")
    moved = dict(one.tensors)
    moved["norm.weight"] = moved["norm.weight"] + 1e-3
    others = [
        replace(one, tensors=moved),
        one.resized((56, 48)),
        replace(one, preprocess=one.preprocess.model_copy(update={"mean": (0.4, 0.5, 0.5)})),
    ]
    squashed = replace(
        one, preprocess=one.preprocess.model_copy(update={"interpolation": "bilinear"})
    )
    first, same, *different = keys(one, squashed, *others)
    assert first == same
    assert len({first, *different}) == 4


def test_backbones_keep_non_linear_heads() -> None:
    distilled = checkpoint_of("distilled")
    key, head = backbone_and_head(distilled)
    tensors = dict(distilled.tensors)
    tensors["head.bias"] = tensors["head.bias"] + 1
    assert head is None
    assert backbone_and_head(replace(distilled, tensors=tensors))[0] != key
