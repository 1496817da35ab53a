"""Training from a folder of pictures and a recipe to a folder that the service loads.

    data -> train -> half precision -> temperature -> test set, once -> config, weights, model card

The test set is measured after the last choice is made: weights, temperature and recipe are fixed by then.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from model.checkpoint import Checkpoint, native
from model.config import PreprocessConfig
from model.data.datasets import Dataset, is_cifar10, open_dataset
from model.data.labelled_images import MEMORY, Images, PixelStorage, channel_statistics
from model.errors import TrainingError
from model.evaluation.calibration import MIN_CALIBRATION_IMAGES, calibration_of, fit_temperature
from model.evaluation.evaluate import Evaluation, measure, predict_logits
from model.runtime.device import choose_device
from model.runtime.predictor import Predictor
from model.training import run_folder
from model.training.loop import Trainer
from model.training.recipe import RECIPES, Recipe, to_toml
from model.training.report.figures import write_figures
from model.training.report.model_card import model_card
from model.training.run_record import RunRecord, describe_device, installed_versions
from model.training.start import Start, start_from
from model.training.training_data import TrainingData

logger = logging.getLogger(__name__)

_MARGIN: Final = 256 / 224
"""Training pictures that random parts are resized from are kept larger than the model's input by this factor."""


STORED_DTYPE: Final = torch.float16
"""Dtype of the weights on disk."""


@dataclass(frozen=True)
class CalibratedCheckpoint:
    """A checkpoint as it is stored and served, with its evaluations.

    Attributes:
        checkpoint: float32, rounded to `STORED_DTYPE`, with its temperature.
        predictor: runs the same weights without the temperature.
        validation, validation_uncalibrated: on the validation set, with the temperature and without it.
    """

    checkpoint: Checkpoint
    predictor: Predictor
    validation: Evaluation
    validation_uncalibrated: Evaluation


def default_recipe(data: Path, checkpoint: str | None) -> Path:
    """Return the bundled recipe for data of this kind: from scratch, or to fine-tune a checkpoint."""
    if checkpoint is not None:
        return RECIPES / "finetune.toml"
    return RECIPES / ("cifar10.toml" if is_cifar10(data) else "folder.toml")


def run(
    data: Path,
    out: Path,
    recipe: Recipe,
    *,
    resume: bool = False,
    device: str = "auto",
    memory: int = MEMORY,
    progress: bool = True,
) -> RunRecord:
    """Train by a recipe and leave a servable folder: weights, config, model card, metrics.

    Recipe, data, checkpoint and folder are checked before the first step.

    Args:
        data: folder with the binary version of CIFAR-10, or with a folder of pictures for each class.
        out: folder for the results; made if absent.
        resume: continue the run that `out` holds; a complete run is only measured and written anew.
        device: see `model.runtime.device.choose_device`.
        memory: bytes of decoded pictures up to which they are kept in memory; more go to a file in `out`.

    Raises:
        DatasetError: the data cannot be read or trained on.
        CheckpointError: the checkpoint to start from cannot be read.
        DeviceError: the device is not available here.
        TrainingError: `out` holds something already and `resume` is false, or nothing that this recipe could
            continue; another run is under way there; the recipe does not fit the data; or training diverged.
    """
    training_device = choose_device(device)
    dataset = open_dataset(data, recipe.validation, recipe.seed)
    storage = PixelStorage(out, memory)
    run_folder.prepare_folder(out, dataset, data, resume=resume)
    with run_folder.folder_lock(out):
        start = start_from(recipe, len(dataset.labels), dataset.image_size)
        if (count := dataset.train_count) < recipe.batch_size:
            raise TrainingError(f"recipe: batch_size {recipe.batch_size}: there are only {count} training images")
        sizes = (len(dataset.labels), dataset.train_count, dataset.validation_count)
        logger.info("%s: %d classes, %d images to train on, %d to validate on", data, *sizes)
        run_folder.record_start(out, recipe, dataset, resume=resume)
        size = _training_size(recipe, start, dataset)
        train, validation = dataset.load(size, start.preprocess, storage, progress=progress)
        if start.weights is None:
            mean, std = channel_statistics(train.pixels)
            start = replace(start, preprocess=start.preprocess.model_copy(update={"mean": mean, "std": std}))
        trainer = _make_trainer(recipe, start, train, validation, out, training_device)
        if resume and (out / run_folder.STATE_FILE).exists():
            trainer.load()
            run_folder.write_text(out / run_folder.RECIPE_FILE, to_toml(recipe))
        trainer.run(_log_epoch, progress=progress)
        last, kept, kept_epoch = _calibrated(trainer, start, dataset.labels, validation, device, progress)
        test = None
        if dataset.has_test:
            images = dataset.load_test(kept.checkpoint.preprocess, storage, progress=progress)
            logits = torch.from_numpy(predict_logits(kept.predictor, images.pixels, progress=progress))
            test = _measure_calibrated(logits, images, kept.checkpoint)
        record = _record(trainer, start, dataset, kept, kept_epoch, test)
        _write_results(out, record, trainer, last.checkpoint, kept.checkpoint)
    text = "%s: %s accuracy %.2f%% after %.0f s of training"
    split, accuracy = "validation" if record.test is None else "test", 100 * record.measured.accuracy
    logger.info(text, data, split, accuracy, record.seconds)
    return record


def _training_size(recipe: Recipe, start: Start, dataset: Dataset) -> PreprocessConfig:
    """Return the size of stored training pictures: the model's input size, or larger where random parts are resized.

    Like the model's own picture a larger picture is a centre crop, but of all that the crop leaves of the shorter side.
    """
    preprocess = start.preprocess
    if not recipe.augmentation.resized_crop:
        return preprocess
    rows, columns = dataset.image_size or tuple(round(side * _MARGIN) for side in preprocess.size)
    return preprocess.model_copy(update={"size": (rows, columns), "resize_size": (rows, columns)})


def _make_trainer(
    recipe: Recipe, start: Start, train: Images, validation: Images, out: Path, device: torch.device
) -> Trainer:
    statistics = start.preprocess.mean, start.preprocess.std
    data = TrainingData(*_tensors(train, device), *_tensors(validation, device), *statistics)
    return Trainer(recipe, start.config, data, out, device, initial=start.weights)


def _tensors(images: Images, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return pixels and labels, on the device if they leave half of what is free there, else where they are."""
    if device.type == "cuda" and images.pixels.nbytes > torch.cuda.mem_get_info(device)[0] // 2:
        device = torch.device("cpu")
    return torch.from_numpy(images.pixels).to(device), torch.from_numpy(images.labels).to(device)


def _calibrated(
    trainer: Trainer, start: Start, labels: tuple[str, ...], validation: Images, device: str, progress: bool
) -> tuple[CalibratedCheckpoint, CalibratedCheckpoint, int]:
    """Round and calibrate the last weights and those that are kept; return both, and the epoch of the latter."""

    def calibrate(weights: Mapping[str, Tensor]) -> CalibratedCheckpoint:
        checkpoint = Checkpoint(
            name=trainer.recipe.name,
            source=str(trainer.folder),
            format=native.FORMAT,
            architecture=native.describe_architecture(start.config),
            config=start.config,
            preprocess=start.preprocess,
            labels=labels,
            tensors=weights,
        )
        return round_and_calibrate(checkpoint, validation, device=device, progress=progress)

    last = calibrate(trainer.weights)
    if trainer.recipe.keep == "last" or trainer.best_epoch == trainer.epoch:
        return last, last, trainer.epoch
    return last, calibrate(trainer.best_weights), trainer.best_epoch


def round_and_calibrate(
    checkpoint: Checkpoint, validation: Images, *, device: str, progress: bool
) -> CalibratedCheckpoint:
    """Measure the very numbers that will be served, fit the temperature to them, and keep what makes sets of labels.

    Args:
        checkpoint: float32; its temperature is not used.
        validation: images that were not trained on, in the checkpoint's size.
        device: see `model.runtime.device.choose_device`.

    Raises:
        CheckpointError: a weight is not finite, or too large for the stored dtype.
    """
    stored = rounded(checkpoint)
    predictor = Predictor(stored, device=device, dtype="float32", compile_mode="off")
    logits = torch.from_numpy(predict_logits(predictor, validation.pixels, progress=progress))
    temperature = calibrating_temperature(logits, torch.from_numpy(validation.labels))
    calibration = None
    if len(logits) >= MIN_CALIBRATION_IMAGES:
        calibration = calibration_of(logits.numpy(), validation.labels, temperature, "the validation images")
    stored = replace(stored, temperature=temperature, calibration=calibration)
    return CalibratedCheckpoint(stored, predictor, *_measure_calibrated(logits, validation, stored))


def calibrating_temperature(logits: Tensor, truth: Tensor) -> float:
    """Return the temperature that is fitted to logits [N, K] of images that were not trained on.

    It is 1 where they are fewer than `MIN_CALIBRATION_IMAGES`, or where all are answered right, so that a lower
    temperature would always look better.
    """
    all_right = bool((logits.argmax(dim=1) == truth).all())
    return 1.0 if all_right or len(truth) < MIN_CALIBRATION_IMAGES else fit_temperature(logits, truth)


def rounded(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the very numbers that are stored and served, float32, and without its temperature."""
    tensors = {name: tensor.detach().cpu().to(STORED_DTYPE).float() for name, tensor in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors, temperature=1.0)


def _measure_calibrated(logits: Tensor, images: Images, checkpoint: Checkpoint) -> tuple[Evaluation, Evaluation]:
    """Evaluate logits [N, K] with the checkpoint's temperature and without it."""
    calibrated, uncalibrated = (
        measure((logits / temperature).softmax(dim=1).numpy(), images.labels, checkpoint.labels)
        for temperature in (checkpoint.temperature, 1.0)
    )
    return calibrated, uncalibrated


def _record(
    trainer: Trainer,
    start: Start,
    dataset: Dataset,
    kept: CalibratedCheckpoint,
    kept_epoch: int,
    test: tuple[Evaluation, Evaluation] | None,
) -> RunRecord:
    teacher = trainer.teacher
    return RunRecord(
        recipe=trainer.recipe,
        data=dataset.name,
        started_from=start.name,
        kept_epoch=kept_epoch,
        epochs=trainer.epochs_trained,
        images=dataset.train_count,
        validation_images=dataset.validation_count,
        seconds=trainer.seconds + (0.0 if teacher is None else teacher.seconds),
        cpu_seconds=trainer.cpu_seconds + (0.0 if teacher is None else teacher.cpu_seconds),
        teacher=teacher,
        device=describe_device(trainer.device),
        precision=str(trainer.dtype).removeprefix("torch."),
        parameters=kept.predictor.parameters,
        versions=installed_versions(),
        temperature=kept.checkpoint.temperature,
        validation=kept.validation,
        validation_uncalibrated=kept.validation_uncalibrated,
        test=None if test is None else test[0],
        test_uncalibrated=None if test is None else test[1],
    )


def _write_results(out: Path, record: RunRecord, trainer: Trainer, last: Checkpoint, kept: Checkpoint) -> None:
    """Write checkpoints, figures and card; the folder is servable when all else is written, and not before."""
    native.write(out / run_folder.LAST_FOLDER, last, dtype=STORED_DTYPE, training={"epoch": trainer.epoch})
    pictures = write_figures(out, record.measured, kept.labels, trainer.history)
    run_folder.write_text(out / run_folder.CARD_FILE, model_card(record, kept, pictures))
    native.write(out, kept, dtype=STORED_DTYPE, training=record.record())
    if kept.calibration is not None:  # of the rounded weights, so it holds for them in any dtype
        native.write_calibration(out, kept.calibration)


def _log_epoch(metrics: run_folder.EpochMetrics) -> None:
    accuracy = metrics.validation_accuracy
    validation = "" if accuracy is None else f", validation accuracy {accuracy:.2%}"
    trained = f"loss {metrics.train_loss:.3f}, accuracy {metrics.train_accuracy:.2%}"
    pace = f"{metrics.images_per_second:.0f} images/s, {metrics.seconds:.0f} s"
    logger.info("epoch %d: %s%s, %s", metrics.epoch, trained, validation, pace)
