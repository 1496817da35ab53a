from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint import load_checkpoint
from model.data.cifar10 import read_test, read_train, split_validation
from model.data.labelled_images import channel_statistics
from model.errors import DatasetError, TrainingError
from model.evaluation.evaluate import measure, predict_logits, predict_scores
from model.runtime.predictor import Predictor
from model.training.recipe import Recipe, read_recipe
from model.training.run_folder import CARD_FILE, folder_lock
from model.training.run_record import RunRecord
from model.training.train import run
from tests.model.conftest import tiny_recipe
from tests.model.training.synthetic import LABELS, write_cifar

pytestmark = pytest.mark.timeout(120)  # models are trained


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunRecord]:
    """A folder of a finished run, which no test changes, and what it gave."""
    folder = tmp_path_factory.mktemp("finished")
    torch.set_num_threads(1)  # as in the tests
    out = folder / "run"
    return out, run(write_cifar(folder / "cifar"), out, tiny_recipe(), device="cpu", progress=False)


@pytest.fixture
def finished(finished_once: tuple[Path, RunRecord], tmp_path: Path) -> tuple[Path, RunRecord]:
    out, result = finished_once
    return shutil.copytree(out, tmp_path / "run"), result


def test_a_run_leaves_a_folder_that_the_service_loads_and_that_scores_as_reported(
    finished: tuple[Path, RunRecord], cifar: Path
) -> None:
    out, result = finished
    assert result.test is not None
    checkpoint = load_checkpoint(str(out))
    assert checkpoint.labels == LABELS
    assert checkpoint.name == "tiny"
    assert checkpoint.temperature == result.temperature != 1.0
    images = read_test(cifar)
    scores = predict_scores(Predictor(checkpoint, device="cpu", compile_mode="off", dtype="float32"), images.pixels)
    measured = measure(scores, images.labels, checkpoint.labels)
    assert measured.count == 100
    assert measured.accuracy == result.test.accuracy > 0.5
    assert measured.loss == pytest.approx(result.test.loss, rel=1e-4)
    assert measured.calibration_error == pytest.approx(result.test.calibration_error, abs=1e-4)


def test_stored_weights_are_half_precision(finished: tuple[Path, RunRecord]) -> None:
    out, _ = finished
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.float16}


def test_weights_are_readable_for_whoever_reads_the_config(finished: tuple[Path, RunRecord]) -> None:
    out, _ = finished
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode


def test_the_temperature_lowers_the_loss_on_the_validation_images(finished: tuple[Path, RunRecord]) -> None:
    _, result = finished
    assert result.validation.loss < result.validation_uncalibrated.loss
    assert result.validation.accuracy == result.validation_uncalibrated.accuracy


def test_the_folder_is_calibrated_on_the_validation_images(finished: tuple[Path, RunRecord], cifar: Path) -> None:
    out, result = finished
    calibration = load_checkpoint(str(out)).calibration
    assert calibration is not None
    assert calibration.temperature == result.temperature
    assert calibration.pictures == len(calibration.scores) == result.validation.count
    assert np.mean(np.greater(calibration.scores, 0.5)) == pytest.approx(result.validation.accuracy, abs=0.1)
    # Energies are of the network's own logits: log-probabilities would have energies near 0, which tell nothing.
    images = read_test(cifar)
    predictor = Predictor(load_checkpoint(str(out)), device="cpu", compile_mode="off", dtype="float32")
    logits = predict_logits(predictor, images.pixels)
    energies = np.log(np.exp(logits / calibration.temperature).sum(axis=1))
    assert np.median(calibration.energies) == pytest.approx(np.median(energies), rel=0.2)
    assert np.std(energies) > 0.01


def test_preprocessing_is_measured_on_the_training_images_alone(
    finished: tuple[Path, RunRecord], cifar: Path, recipe: Recipe
) -> None:
    out, _ = finished
    train, _ = split_validation(read_train(cifar), int(recipe.validation), recipe.seed)
    scaled = train.pixels.astype(np.float64) / 255
    preprocess = load_checkpoint(str(out)).preprocess
    assert preprocess.mean == pytest.approx(scaled.mean(axis=(0, 2, 3)), abs=1e-4)
    assert preprocess.std == pytest.approx(scaled.std(axis=(0, 2, 3)), abs=1e-4)


def test_channels_keep_their_order_in_the_statistics() -> None:
    pixels = np.zeros((2, 3, 4, 4), dtype=np.uint8)
    pixels[:, 0], pixels[0, 2] = 255, 255
    assert channel_statistics(pixels) == ((1.0, 0.0, 0.5), (0.0, 0.0, 0.5))


def test_the_record_and_the_card_tell_what_was_measured(finished: tuple[Path, RunRecord], recipe: Recipe) -> None:
    out, result = finished
    assert result.test is not None
    record = json.loads((out / "config.json").read_text())["training"]
    assert Recipe.model_validate(record["recipe"]) == recipe
    assert record["test"]["accuracy"] == result.test.accuracy
    assert record["images"] == 320
    assert record["epochs"] == 4.0
    card = (out / CARD_FILE).read_text()
    for told in (f"{result.test.accuracy:.2%}", f"{result.parameters:,}", *LABELS, torch.__version__, "seed 3"):
        assert told in card


def test_test_images_are_not_opened_before_training_is_over(cifar: Path, tmp_path: Path, recipe: Recipe) -> None:
    (cifar / "test_batch.bin").write_bytes(b"\xff" * 3073)
    with pytest.raises(DatasetError, match=r"test_batch\.bin: record 0 has label 255"):
        run(cifar, tmp_path / "run", recipe, device="cpu", progress=False)
    assert (tmp_path / "run" / "last.pt").exists()


def test_a_test_set_that_is_missing_or_cut_short_is_told_before_training(
    cifar: Path, tmp_path: Path, recipe: Recipe
) -> None:
    (cifar / "test_batch.bin").write_bytes(b"\xff" * 3072)
    with pytest.raises(DatasetError, match=r"test_batch\.bin: 3072 bytes"):
        run(cifar, tmp_path / "run", recipe, device="cpu", progress=False)
    (cifar / "test_batch.bin").unlink()
    with pytest.raises(DatasetError, match=r"test_batch\.bin: cannot be read"):
        run(cifar, tmp_path / "run", recipe, device="cpu", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_measured_again_with_the_same_result(
    finished: tuple[Path, RunRecord], cifar: Path, recipe: Recipe
) -> None:
    out, result = finished
    again = run(cifar, out, recipe, resume=True, device="cpu", progress=False)
    assert again.test == result.test
    assert again.temperature == result.temperature
    assert again.seconds == result.seconds


def test_a_folder_with_a_run_in_it_is_not_overwritten(
    finished: tuple[Path, RunRecord], cifar: Path, recipe: Recipe
) -> None:
    out, _ = finished
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(TrainingError, match="holds a run already"):
        run(cifar, out, recipe, device="cpu", progress=False)
    assert (out / "model.safetensors").read_bytes() == before


def test_a_run_that_left_only_its_state_is_finished(
    finished: tuple[Path, RunRecord], cifar: Path, tmp_path: Path, recipe: Recipe
) -> None:
    out, result = finished
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("last.pt", "best.pt", "metrics.csv"):
        (out / name).rename(moved / name)
    again = run(cifar, moved, recipe, resume=True, device="cpu", progress=False)
    assert again.test == result.test
    assert read_recipe(moved / "recipe.toml") == recipe
    assert load_checkpoint(str(moved)).temperature == result.temperature


def test_the_last_epoch_is_kept_beside_the_best(finished: tuple[Path, RunRecord], cifar: Path, recipe: Recipe) -> None:
    out, best = finished
    last = run(cifar, out, recipe, resume=True, device="cpu", progress=False)
    assert last.kept_epoch == best.kept_epoch
    rows = list(csv.DictReader((out / "metrics.csv").read_text().splitlines()))
    accuracies = [float(row["validation_accuracy"]) for row in rows]
    assert accuracies[best.kept_epoch - 1] == max(accuracies)
    for folder, epoch in ((out, best.kept_epoch), (out / "last", recipe.epochs)):
        checkpoint = load_checkpoint(str(folder))
        assert checkpoint.labels == LABELS
        record = json.loads((folder / "config.json").read_text())["training"]
        assert record.get("kept_epoch", record.get("epoch")) == epoch


def test_a_folder_that_holds_something_else_is_not_touched(cifar: Path, tmp_path: Path, recipe: Recipe) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"run: is not empty \(config\.json\); choose another folder"):
        run(cifar, out, recipe, device="cpu", progress=False)
    assert [path.name for path in out.iterdir()] == ["config.json"]


def test_a_batch_larger_than_the_data_is_refused_before_training(cifar: Path, tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(TrainingError, match="batch_size 321: there are only 320 training images"):
        run(cifar, tmp_path / "run", recipe.override(batch_size=321), device="cpu", progress=False)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_recipe_without_a_model_is_refused(cifar: Path, tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(TrainingError, match="neither an architecture to train from scratch nor a checkpoint"):
        run(cifar, tmp_path / "run", recipe.override(architecture=None), device="cpu", progress=False)


def test_nothing_to_resume_is_said(cifar: Path, tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(TrainingError, match="nothing to resume"):
        run(cifar, tmp_path / "run", recipe, resume=True, device="cpu", progress=False)


def test_one_run_at_a_time_in_a_folder(tmp_path: Path) -> None:
    with (
        folder_lock(tmp_path),
        pytest.raises(TrainingError, match="another run is writing here"),
        folder_lock(tmp_path),
    ):
        pass
    with folder_lock(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
