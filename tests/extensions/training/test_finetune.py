"""Train from pictures and a checkpoint a model of other classes at another resolution."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import Checkpoint, load_checkpoint, native
from model.config import PreprocessConfig, ViTConfig
from model.errors import CheckpointError, TrainingError
from model.extensions.datasets.folders import find_pictures
from model.extensions.training.recipe import RECIPES, Recipe, read_recipe
from model.extensions.training.train import run, start_from
from model.images.preprocess import preprocess
from model.network.vit import VisionTransformer
from model.outputs import RequestedOutputs
from model.runtime.predictor import Predictor
from tests.extensions.datasets.picture_folders import COLOURS, write_class, write_folder

pytestmark = pytest.mark.timeout(120)  # models are trained

MEAN = (0.4, 0.5, 0.6)
STD = (0.2, 0.3, 0.25)


def write_checkpoint(folder: Path, **fields: Any) -> Path:
    """Return a model of two layers and seven classes at 16 pixels, with weights of a fixed seed."""
    config = ViTConfig(
        **{
            "image_size": (16, 16),
            "patch_size": 8,
            "width": 32,
            "depth": 2,
            "heads": 2,
            "mlp_width": 64,
            "num_classes": 7,
            **fields,
        }
    )
    model = VisionTransformer(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("head"):
                parameter.fill_(0.5)
    channels = config.in_channels
    native.write(
        folder,
        Checkpoint(
            name="start",
            source="made",
            format=native.FORMAT,
            architecture="vit",
            config=config,
            preprocess=PreprocessConfig(
                size=config.image_size,
                resize="squash",
                resize_size=config.image_size,
                interpolation="bilinear",
                mean=MEAN[:channels],
                std=STD[:channels],
            ),
            labels=tuple("abcdefg"),
            tensors=model.state_dict(),
            temperature=3.0,
            multi_label=True,
        ),
        dtype=torch.float32,
    )
    return folder


@pytest.fixture
def tuning() -> Recipe:
    return read_recipe(RECIPES / "finetune.toml").override(
        {"epochs": 6, "batch_size": 8, "precision": "float32", "optimiser.learning_rate": 3e-3}
    )


def test_fine_tuning_learns_other_classes(tmp_path: Path, tuning: Recipe) -> None:
    start = write_checkpoint(tmp_path / "start")
    data = write_folder(tmp_path / "data", 12)
    out = tmp_path / "out"
    recipe = tuning.override(checkpoint=str(start), image_size=(24, 32), validation=0.25)
    result = run(data, out, recipe, device="cpu")
    assert (result["images"], result["validation_images"], result["started_from"]) == (
        27,
        9,
        "start",
    )
    assert result["test"] is None
    assert result["validation"]["accuracy"] == 1.0
    checkpoint = load_checkpoint(str(out))
    assert checkpoint.labels == tuple(COLOURS)
    assert checkpoint.config.image_size == checkpoint.preprocess.size == (24, 32)
    assert (checkpoint.preprocess.mean, checkpoint.preprocess.std) == (MEAN, STD)
    assert (checkpoint.preprocess.resize, checkpoint.preprocess.interpolation) == (
        "squash",
        "bilinear",
    )
    assert not checkpoint.multi_label
    predictor = Predictor(checkpoint, device="cpu", compile_mode="off", dtype="float32")
    for index, colour in enumerate(COLOURS):
        [path] = write_class(tmp_path / "new" / colour, colour, 1, seed=9)
        pixels = preprocess(path.read_bytes(), checkpoint.preprocess)
        assert predictor.predict(pixels[np.newaxis], RequestedOutputs(1))[0].indices.tolist() == [
            index
        ]


def test_a_resumed_run_refuses_changed_data(tmp_path: Path, tuning: Recipe) -> None:
    start = write_checkpoint(tmp_path / "start")
    data = write_folder(tmp_path / "data", 6)
    recipe = tuning.override(checkpoint=str(start), epochs=1)
    run(data, tmp_path / "out", recipe, device="cpu")
    write_class(data / "red", "red", 7)
    with pytest.raises(TrainingError, match=r"split\.json: the data now hold other files"):
        run(data, tmp_path / "out", recipe, resume=True, device="cpu")


VARIANTS: dict[str, dict[str, Any]] = {
    "distilled": {"distillation_token": True, "distillation_head": True},
    "attention pool": {"class_token": False, "pool": "attention"},
    "registers": {"registers": 2, "position_prefix": False},
    "fixed positions": {"position_embedding": "sincos2d", "pool": "mean"},
    "swiglu, scaled, normed": {
        "mlp": "swiglu",
        "layer_scale": True,
        "qk_norm": True,
        "norm_before_blocks": True,
    },
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_kind_can_be_fine_tuned(
    tmp_path: Path, tuning: Recipe, fields: dict[str, Any]
) -> None:
    start = write_checkpoint(tmp_path / "start", **fields)
    recipe = tuning.override({"checkpoint": str(start), "epochs": 2, "batch_size": 4})
    result = run(write_folder(tmp_path / "data", 6), tmp_path / "out", recipe, device="cpu")
    checkpoint = load_checkpoint(str(tmp_path / "out"))
    assert checkpoint.config == load_checkpoint(str(start)).config.model_copy(
        update={"num_classes": 3}
    )
    assert result["validation"]["count"] == 3
    before = load_checkpoint(str(start)).tensors
    fixed = {"pos_embed"} if fields.get("position_embedding") == "sincos2d" else set()
    heads = {name for name in before if name.startswith("head")}
    for name, tensor in checkpoint.tensors.items():
        if (
            tensor.ndim > 1 and name not in heads
        ):  # some biases and norms have no effect on any score
            assert torch.equal(tensor, before[name].half().float()) == (name in fixed), name


def test_a_new_head_starts_at_zero(tmp_path: Path, tuning: Recipe) -> None:
    source = write_checkpoint(tmp_path / "start", **VARIANTS["distilled"])
    start = start_from(tuning.override(checkpoint=str(source)), 3, None)
    before = load_checkpoint(str(source)).tensors
    assert start.weights is not None
    assert start.weights.keys() == before.keys()
    for name, tensor in start.weights.items():
        if name.startswith("head"):
            assert tensor.shape == (3, *before[name].shape[1:])
            assert not tensor.any()
        else:
            assert torch.equal(tensor, before[name])


def test_an_unfit_checkpoint_is_refused(tmp_path: Path, tuning: Recipe) -> None:
    grey = tuning.override(checkpoint=str(write_checkpoint(tmp_path / "grey", in_channels=1)))
    with pytest.raises(TrainingError, match="greyscale"):
        start_from(grey, 3, None)
    with pytest.raises(
        CheckpointError, match="image size 20x20 is not a multiple of the patch size 8"
    ):
        start_from(tuning.override(checkpoint=str(tmp_path / "grey"), image_size=(20, 20)), 3, None)
    with pytest.raises(CheckpointError, match="no such folder"):
        start_from(tuning.override(checkpoint="./nowhere"), 3, None)


def test_training_from_scratch_needs_a_size(tmp_path: Path, recipe: Recipe) -> None:
    data = write_folder(tmp_path / "data", 6)
    with pytest.raises(TrainingError, match="image_size: needed to train from scratch"):
        run(data, tmp_path / "out", recipe.override(batch_size=4, validation=3), device="cpu")


def test_a_folder_is_learned_from_scratch(tmp_path: Path, recipe: Recipe) -> None:
    root = tmp_path / "data"
    for seed, (name, count) in enumerate({"train": 12, "validation": 4, "test": 5}.items()):
        write_folder(root / name, count, seed=seed)
    changes = {"batch_size": 6, "epochs": 8, "image_size": (16, 24), "augmentation.crop_padding": 1}
    result = run(root, tmp_path / "out", recipe.override(changes), device="cpu")
    assert (result["images"], result["validation_images"], result["test"]["count"]) == (36, 12, 15)
    assert result["test"]["accuracy"] > 0.9
    preprocess_of = load_checkpoint(str(tmp_path / "out")).preprocess
    assert preprocess_of.size == (16, 24)
    train = find_pictures(root).sets["train"]
    pixels = [preprocess(train.read(number), preprocess_of) / 255 for number in range(len(train))]
    assert preprocess_of.mean == pytest.approx(np.mean(pixels, axis=(0, 1, 2)), abs=1e-4)
