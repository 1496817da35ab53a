"""From pictures and a checkpoint to a model of other classes at another resolution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import load_checkpoint
from model.errors import CheckpointError, TrainingError
from model.images.preprocess import preprocess
from model.outputs import RequestedOutputs
from model.runtime.predictor import Predictor
from model.training.recipe import Recipe
from model.training.train import run, start_from
from tests.model.data.picture_folders import COLOURS, write_class, write_folder
from tests.model.training.runs import changed
from tests.model.training.synthetic import MEAN, STD, write_start

pytestmark = pytest.mark.timeout(120)  # models are trained


@pytest.fixture
def tuning(tmp_path: Path) -> Recipe:
    start = write_start(tmp_path / "start")
    return Recipe(name="tuned", checkpoint=str(start), epochs=6, batch_size=8, precision="float32", learning_rate=3e-3)


def test_a_folder_and_a_checkpoint_become_a_model_of_other_classes_at_another_size(
    tmp_path: Path, tuning: Recipe
) -> None:
    data = write_folder(tmp_path / "data", 12)
    out = tmp_path / "out"
    recipe = changed(tuning, image_size=(24, 32), validation=0.25)
    result = run(data, out, recipe, device="cpu")
    assert (result["images"], result["validation_images"], result["started_from"]) == (27, 9, "start")
    assert result["test"] is None
    assert result["validation"]["accuracy"] == 1.0
    checkpoint = load_checkpoint(str(out))
    assert checkpoint.labels == tuple(COLOURS)
    assert checkpoint.config.image_size == checkpoint.preprocess.size == (24, 32)
    assert (checkpoint.preprocess.mean, checkpoint.preprocess.std) == (MEAN, STD)
    assert (checkpoint.preprocess.resize, checkpoint.preprocess.interpolation) == ("squash", "bilinear")
    assert not checkpoint.multi_label
    predictor = Predictor(checkpoint, device="cpu", compile_mode="off", dtype="float32")
    for index, colour in enumerate(COLOURS):
        [path] = write_class(tmp_path / "new" / colour, colour, 1, seed=9)
        pixels = preprocess(path.read_bytes(), checkpoint.preprocess)
        assert predictor.predict(pixels[np.newaxis], RequestedOutputs(1))[0].indices.tolist() == [index]


VARIANTS: dict[str, dict[str, Any]] = {
    "distilled": {"distillation_token": True, "distillation_head": True},
    "attention pool": {"class_token": False, "pool": "attention"},
    "registers": {"registers": 2, "position_prefix": False},
    "fixed positions": {"position_embedding": "sincos2d", "pool": "mean"},
    "swiglu, scaled, normed": {"mlp": "swiglu", "layer_scale": True, "qk_norm": True, "norm_before_blocks": True},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_kind_of_model_can_be_fine_tuned(tmp_path: Path, tuning: Recipe, fields: dict[str, Any]) -> None:
    start = write_start(tmp_path / "kind", **fields)
    recipe = changed(tuning, checkpoint=str(start), epochs=4, batch_size=4)
    result = run(write_folder(tmp_path / "data", 6), tmp_path / "out", recipe, device="cpu")
    checkpoint = load_checkpoint(str(tmp_path / "out"))
    assert checkpoint.config == load_checkpoint(str(start)).config.model_copy(update={"num_classes": 3})
    assert result["validation"]["count"] == 3
    before = load_checkpoint(str(start)).tensors
    fixed = {"pos_embed"} if fields.get("position_embedding") == "sincos2d" else set()
    heads = {name for name in before if name.startswith("head")}
    for name, tensor in checkpoint.tensors.items():
        if tensor.ndim > 1 and name not in heads:  # of biases and norms, some have no effect on any score
            assert torch.equal(tensor, before[name].half().float()) == (name in fixed), name


def test_a_new_head_starts_at_zero_and_the_rest_at_the_checkpoint(tmp_path: Path, tuning: Recipe) -> None:
    source = write_start(tmp_path / "kind", **VARIANTS["distilled"])
    start = start_from(changed(tuning, checkpoint=str(source)), ("a", "b", "c"))
    before = load_checkpoint(str(source)).tensors
    assert start.tensors.keys() == before.keys()
    for name, tensor in start.tensors.items():
        if name.startswith("head"):
            assert tensor.shape == (3, *before[name].shape[1:])
            assert not tensor.any()
        else:
            assert torch.equal(tensor, before[name])


def test_what_cannot_be_fine_tuned_is_refused(tmp_path: Path, tuning: Recipe) -> None:
    grey, labels = changed(tuning, checkpoint=str(write_start(tmp_path / "grey", in_channels=1))), ("a", "b", "c")
    with pytest.raises(TrainingError, match="greyscale"):
        start_from(grey, labels)
    with pytest.raises(CheckpointError, match="image size 20x20 is not a multiple of the patch size 8"):
        start_from(changed(grey, image_size=(20, 20)), labels)
    with pytest.raises(CheckpointError, match="no such folder"):
        start_from(changed(tuning, checkpoint="./nowhere"), labels)


def test_a_given_split_is_used_and_its_test_pictures_are_measured(tmp_path: Path, tuning: Recipe) -> None:
    root = tmp_path / "data"
    for seed, (name, count) in enumerate({"train": 12, "validation": 4, "test": 5}.items()):
        write_folder(root / name, count, seed=seed)
    result = run(root, tmp_path / "out", changed(tuning, batch_size=6), device="cpu")
    assert (result["images"], result["validation_images"], result["test"]["count"]) == (36, 12, 15)
    assert result["test"]["accuracy"] > 0.9
