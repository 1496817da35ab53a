"""A new head on frozen features: the served model answers like the fitted head."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import Checkpoint, load_checkpoint
from model.config import LibraryConfig
from model.errors import CheckpointError, DatasetError, TrainingError
from model.extensions.datasets.split_record import SplitRecord
from model.extensions.evaluation.evaluate import predict_embeddings
from model.extensions.training.new_head import library_head, run, with_head
from model.extensions.training.recipe import RECIPES, Recipe, read_recipe
from model.heads import Head
from model.images.preprocess import preprocess
from model.network.library import LibraryNetwork, library_config, linear_head
from model.outputs import (
    EmbeddingRequest,
    MapRequest,
    RequestedOutputs,
    embedding_width,
)
from model.runtime.backend import CompileMode
from model.runtime.openvino.backend import OpenVino
from model.runtime.predictor import Predictor
from model.runtime.torch_backend import TorchCpu
from tests.extensions.datasets.picture_folders import COLOURS, write_class, write_folder
from tests.extensions.evaluation.scores import predict_scores
from tests.model.checkpoint import whole_models
from tests.model.runtime.predictions import logits_of
from tests.service.cli.command_line import write_checkpoint
from tests.timm_reference import timm

pytestmark = pytest.mark.timeout(60)  # heads are fitted

LABELS = tuple(COLOURS)


def probe_of(checkpoint: Path) -> Recipe:
    return read_recipe(RECIPES / "finetune.toml").override(
        {"checkpoint": str(checkpoint), "name": "colours", "precision": "float32"}
    )


def predictor_of(checkpoint: Checkpoint, compile_mode: CompileMode = "off") -> Predictor:
    return Predictor(
        checkpoint, device="cpu", compile_mode=compile_mode, dtype="float32", threads=1
    )


def channels_last(pixels: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))


def head_of(width: int) -> Head:
    random = np.random.default_rng(width)
    weight = random.normal(size=(3, width)) / 3
    bias = random.normal(size=3)
    return Head(LABELS, False, weight=weight.astype(np.float32), bias=bias.astype(np.float32))


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deep": {"depth": 5},
    "two heads": {"distillation_token": True, "distillation_head": True},
    "no head": {"labels": ()},
    "cosines": {"normalized_head": True, "projection_width": 20},
    "CLS and mean": {"pool": "cls_mean"},
    "attention pool": {"class_token": False, "pool": "attention"},
    "mean, fc_norm": {"class_token": False, "pool": "mean", "norm_after_pool": True},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_network_serves_its_probe(tmp_path: Path, fields: dict[str, Any]) -> None:
    start = load_checkpoint(str(write_checkpoint(tmp_path, **{"labels": "abcde", **fields})))
    pixels = np.random.default_rng(0).integers(
        0, 256, (3, start.config.in_channels, 16, 16), np.uint8
    )
    features = predict_embeddings(predictor_of(start), pixels, "transfer")
    head = head_of(features.shape[1])
    changed = with_head(start, head)
    assert (changed.labels, changed.config.num_classes) == (LABELS, 3)
    logits = logits_of(predictor_of(changed), channels_last(pixels))
    np.testing.assert_allclose(logits, head.logits(features), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("class_index", [None, 1], ids=["best", "named"])
def test_map_equals_that_of_a_taught_head(
    tmp_path: Path, class_index: int | None, fields: dict[str, Any]
) -> None:
    start = load_checkpoint(str(write_checkpoint(tmp_path, **{"labels": "abcde", **fields})))
    head = head_of(embedding_width(start.config, "transfer"))
    beside = predictor_of(start)
    beside.heads["taught"] = replace(head, features="transfer")
    pixels = np.random.default_rng(0).integers(
        0, 256, (2, 16, 16, start.config.in_channels), np.uint8
    )
    request = RequestedOutputs(
        1, MapRequest("relevance", class_index), embedding=EmbeddingRequest("transfer")
    )
    served = predictor_of(with_head(start, head)).predict(pixels, request)
    taught = beside.predict(pixels, replace(request, head_name="taught"))
    for ours, theirs in zip(served, taught, strict=True):
        assert ours.map is not None
        assert theirs.map is not None
        assert ours.map.request == theirs.map.request
        np.testing.assert_allclose(ours.map.values, theirs.map.values, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_probe_has_maps_of_attention(tmp_path: Path, fields: dict[str, Any]) -> None:
    start = load_checkpoint(str(write_checkpoint(tmp_path, **{"labels": "abcde", **fields})))
    head = head_of(embedding_width(start.config, "transfer"))
    pixels = np.zeros((1, 16, 16, start.config.in_channels), np.uint8)
    request = RequestedOutputs(1, MapRequest.attention_row(1))
    [outputs] = predictor_of(with_head(start, head)).predict(pixels, request)
    assert outputs.map is not None
    assert outputs.map.values.sum() == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize(
    ("size", "fields"),
    [((16, 16), {}), ((96, 80), {"class_token": False, "pool": "mean"})],
    ids=["cls, coarse", "patches, fine"],
)
def test_openvino_serves_a_probe_like_torch(
    tmp_path: Path,
    size: tuple[int, int],
    fields: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = load_checkpoint(str(write_checkpoint(tmp_path, "abcde", image_size=size, **fields)))
    probe = with_head(start, head_of(embedding_width(start.config, "transfer")))
    pixels = np.random.default_rng(0).integers(0, 256, (1, *size, 3), np.uint8)
    request = RequestedOutputs(3, MapRequest("relevance"), logits=True)
    by_torch = predictor_of(probe).predict(pixels, request)
    predictor = predictor_of(probe, "auto")
    backend = predictor._backend
    assert isinstance(backend, OpenVino)
    backend.prepare("relevance")
    monkeypatch.setattr(TorchCpu, "predict", lambda *_, **__: pytest.fail("torch computed it"))
    for ours, theirs in zip(predictor.predict(pixels, request), by_torch, strict=True):
        assert ours.logits is not None
        assert theirs.logits is not None
        assert ours.map is not None
        assert theirs.map is not None
        np.testing.assert_allclose(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(ours.map.values, theirs.map.values, rtol=1e-3, atol=1e-4)


def test_clips_image_tower_gets_a_head(tmp_path: Path) -> None:
    whole_models.clip(tmp_path)
    start = load_checkpoint(str(tmp_path), labels="numbers")
    assert start.config.num_classes == 0
    changed = with_head(start, head_of(embedding_width(start.config, "transfer")))
    assert changed.zero_shot is None
    changed.build()


def test_a_librarys_last_layer_is_replaced() -> None:
    timm()
    config = library_config("test_resnet", {}, 5, 3, (64, 64))
    assert linear_head(config) == "fc"
    changed = library_config("test_resnet", {}, 3, 3, (64, 64))
    module: Any = LibraryNetwork(changed).module
    assert module.get_classifier().weight.shape == (3, config.width)
    with pytest.raises(
        CheckpointError, match=r"^timm's levit_128s: does not end in one linear layer"
    ):
        library_head(
            LibraryConfig.model_validate(
                config.model_dump() | {"architecture": "levit_128s", "width": 384}
            )
        )


def test_served_probe_scores_as_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start = write_checkpoint(tmp_path / "start", "abcde")
    data = tmp_path / "data"
    for seed, (split, count) in enumerate({"train": 9, "test": 6}.items()):
        write_folder(data / split, count, seed=seed)
    caplog.set_level(logging.INFO)
    measured = run(data, tmp_path / "out", probe_of(start), device="cpu")
    assert (
        f"{data}: train/ is trained on, a part of it validates, test/ is measured at the end"
        in caplog.text
    )
    assert "of 18 test pictures right (for pictures like these" in caplog.text
    served = load_checkpoint(str(tmp_path / "out"))
    before = load_checkpoint(str(start))
    assert (served.name, served.labels, served.preprocess) == ("colours", LABELS, before.preprocess)
    assert served.vit.pool == "transfer"
    for name, tensor in served.tensors.items():
        assert name.startswith("head.") or torch.equal(
            tensor, before.tensors[name].half().float()
        ), name
    files = sorted((data / "test").rglob("*.png"))
    pixels = np.stack(
        [preprocess(file.read_bytes(), served.preprocess) for file in files]
    ).transpose(0, 3, 1, 2)
    scores = predict_scores(predictor_of(served), pixels)
    by_openvino = predict_scores(predictor_of(served, "auto"), pixels)
    np.testing.assert_allclose(by_openvino, scores, atol=1e-4)
    truth = np.array([LABELS.index(file.parent.name) for file in files])
    assert float((scores.argmax(axis=1) == truth).mean()) == measured.accuracy > 0.9
    right = scores[np.arange(len(truth)), truth].astype(np.float64)
    assert float(-np.log(right).mean()) == pytest.approx(measured.loss, abs=1e-3)


@pytest.mark.parametrize(
    ("split", "count"), [("validation", 6), (None, 12)], ids=["given", "folds"]
)
def test_accuracy_is_of_held_out_pictures(
    tmp_path: Path, split: str | None, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    write_folder(data / "train" if split else data, 4)
    if split:
        write_folder(data / split, 2, seed=1)
    bad = (data / "train" if split else data) / "red" / "bad.png"
    bad.write_bytes(b"no picture")
    recipe = probe_of(write_checkpoint(tmp_path / "start", "abcde"))
    assert run(data, tmp_path / "out", recipe, device="cpu").count == count
    assert (
        "left out: 1 file in class folders cannot be read as pictures: repair, or move out of the "
        f"class folders:\n  {bad}: not a picture" in caplog.text
    )


def test_probe_warns_of_its_own_validation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder's validation pictures are the files of its training pictures."""
    data = tmp_path / "data"
    write_folder(data / "train", 2)
    shutil.copytree(data / "train", data / "val")
    run(
        data,
        tmp_path / "out",
        probe_of(write_checkpoint(tmp_path / "start", "abcde")),
        device="cpu",
    )
    assert "6 of 6 validation pictures, such as" in caplog.text
    assert "are training pictures, too: remove them from one of the sets" in caplog.text
    record = SplitRecord.read(str(tmp_path / "out"))
    assert record is not None
    assert {name: len(pictures) for name, pictures in record.sets.items()} == {"train": 12}


def test_data_without_a_fit_are_refused(tmp_path: Path) -> None:
    start = probe_of(write_checkpoint(tmp_path / "start", "abcde"))
    data = write_folder(tmp_path / "data", 2)
    with pytest.raises(TrainingError, match="checkpoint: a probe needs one"):
        run(data, tmp_path / "out", read_recipe(RECIPES / "cifar10.toml"), device="cpu")
    write_class(data / "violet", "red", 1)
    with pytest.raises(
        DatasetError, match="class 'violet' has 1 picture: it needs one to train on"
    ):
        run(data, tmp_path / "out", start, device="cpu")
    (data / "violet" / "notes.txt").write_text("not a picture")
    with pytest.raises(
        DatasetError, match="class 'violet': less than two of its pictures can be read"
    ):
        run(data, tmp_path / "out", start, device="cpu")
    assert not (tmp_path / "out" / "config.json").exists()
