from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from synthetic import LABELS

from model.checkpoint import load_checkpoint
from model.errors import DatasetError, TrainingError
from model.predictor import Predictor
from model.training.cifar10 import hold_out, read_train
from model.training.evaluate import evaluate_cifar10
from model.training.recipe import Recipe
from model.training.train import CARD_FILE, Run, channel_statistics, run


@pytest.fixture
def finished(cifar: Path, tmp_path: Path, recipe: Recipe) -> tuple[Path, Run]:
    out = tmp_path / "run"
    return out, run(cifar, out, recipe, device="cpu", progress=False)


def test_a_run_leaves_a_folder_that_the_service_loads_and_that_scores_as_reported(
    finished: tuple[Path, Run], cifar: Path
) -> None:
    out, result = finished
    checkpoint = load_checkpoint(str(out))
    assert checkpoint.labels == LABELS
    assert checkpoint.name == "tiny"
    assert checkpoint.temperature == result.temperature != 1.0
    measured = evaluate_cifar10(Predictor(checkpoint, device="cpu", dtype="float32"), cifar)
    assert measured.count == 100
    assert measured.accuracy == result.test.accuracy > 0.5
    assert measured.loss == pytest.approx(result.test.loss, rel=1e-4)
    assert measured.calibration_error == pytest.approx(result.test.calibration_error, abs=1e-4)


def test_stored_weights_are_half_precision(finished: tuple[Path, Run]) -> None:
    out, _ = finished
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.float16}


def test_the_temperature_lowers_the_loss_on_the_held_out_images(finished: tuple[Path, Run]) -> None:
    _, result = finished
    assert result.held_out.loss < result.held_out_uncalibrated.loss
    assert result.held_out.accuracy == result.held_out_uncalibrated.accuracy


def test_preprocessing_is_measured_on_the_training_images_alone(
    finished: tuple[Path, Run], cifar: Path, recipe: Recipe
) -> None:
    out, _ = finished
    train, _ = hold_out(read_train(cifar), recipe.held_out, recipe.seed)
    scaled = train.pixels.astype(np.float64) / 255
    preprocess = load_checkpoint(str(out)).preprocess
    assert preprocess.mean == pytest.approx(scaled.mean(axis=(0, 2, 3)), abs=1e-4)
    assert preprocess.std == pytest.approx(scaled.std(axis=(0, 2, 3)), abs=1e-4)


def test_channels_keep_their_order_in_the_statistics() -> None:
    pixels = np.zeros((2, 3, 4, 4), dtype=np.uint8)
    pixels[:, 0], pixels[0, 2] = 255, 255
    assert channel_statistics(pixels) == ((1.0, 0.0, 0.5), (0.0, 0.0, 0.5))


def test_the_record_and_the_card_tell_what_was_measured(finished: tuple[Path, Run], recipe: Recipe) -> None:
    out, result = finished
    record = json.loads((out / "config.json").read_text())["training"]
    assert Recipe.model_validate(record["recipe"]) == recipe
    assert record["test"]["accuracy"] == result.test.accuracy
    assert record["images"] == 320
    assert record["epochs"] == 4.0
    card = (out / CARD_FILE).read_text()
    for told in (f"{result.test.accuracy:.2%}", f"{result.parameters:,}", *LABELS, torch.__version__, "seed 3"):
        assert told in card


def test_test_images_are_not_opened_before_training_is_over(cifar: Path, tmp_path: Path, recipe: Recipe) -> None:
    (cifar / "test_batch.bin").unlink()
    with pytest.raises(DatasetError, match=r"test_batch\.bin"):
        run(cifar, tmp_path / "run", recipe, device="cpu", progress=False)
    assert (tmp_path / "run" / "last.pt").exists()


def test_a_finished_run_is_measured_again_with_the_same_result(
    finished: tuple[Path, Run], cifar: Path, recipe: Recipe
) -> None:
    out, result = finished
    again = run(cifar, out, recipe, resume=True, device="cpu", progress=False)
    assert again.test == result.test
    assert again.temperature == result.temperature
    assert again.seconds == result.seconds


def test_a_folder_with_a_run_in_it_is_not_overwritten(finished: tuple[Path, Run], cifar: Path, recipe: Recipe) -> None:
    out, _ = finished
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(TrainingError, match="holds a run already"):
        run(cifar, out, recipe, device="cpu", progress=False)
    assert (out / "model.safetensors").read_bytes() == before


def test_nothing_to_resume_is_said(cifar: Path, tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(TrainingError, match="nothing to resume"):
        run(cifar, tmp_path / "run", recipe, resume=True, device="cpu", progress=False)
