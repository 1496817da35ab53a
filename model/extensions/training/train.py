"""Training from a folder of pictures and a recipe to a folder that the service loads.

    data -> train -> half precision -> temperature -> test set, once -> config, weights, model card

The test set is measured when weights, temperature and recipe are final.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.calibration import Fit
from model.checkpoint import Checkpoint, load_checkpoint, native
from model.config import PreprocessConfig, ViTConfig
from model.errors import TrainingError
from model.extensions.datasets.pictures import Images, channel_statistics, decode
from model.extensions.datasets.split_names import TEST, VALIDATION
from model.extensions.datasets.split_record import SplitRecord
from model.extensions.evaluation.calibration import calibration_of
from model.extensions.evaluation.cifar10 import is_cifar10
from model.extensions.evaluation.datasets import Dataset, open_dataset
from model.extensions.evaluation.evaluate import Evaluation, measure, predict_logits
from model.extensions.taught.score_fit import MIN_PICTURES, choose_fit
from model.extensions.training import run_folder
from model.extensions.training.loop import Trainer
from model.extensions.training.recipe import RECIPES, Recipe
from model.extensions.training.training_data import MARGIN, TrainingData
from model.layer_config import Size
from model.network.vit import count_parameters
from model.runtime.device import choose_device
from model.runtime.predictor import Predictor

logger = logging.getLogger(__name__)

# Dtype of the weights on disk.
STORED_DTYPE: Final = torch.float16


@dataclass(frozen=True)
class Start:
    """The model that a run trains, before its first step.

    Attributes:
        config: the architecture, fitted to the data's classes.
        preprocess: preprocessing of the service. From scratch, `run` measures mean and std.
        weights: float32 on the CPU by name; None from scratch.
        name: name of the fine-tuned checkpoint; None from scratch.
    """

    config: ViTConfig
    preprocess: PreprocessConfig
    weights: Mapping[str, Tensor] | None = None
    name: str | None = None


def default_recipe(data: Path, checkpoint: str | None) -> Path:
    """Return the bundled recipe for data of this kind, with or without a checkpoint.

    Raises:
        TrainingError: a folder of pictures needs a checkpoint.
    """
    if checkpoint is not None:
        return RECIPES / "finetune.toml"
    if not is_cifar10(data):
        raise TrainingError(
            "--from CHECKPOINT: needed for a folder of pictures, unless a --recipe has an "
            "architecture"
        )
    return RECIPES / "cifar10.toml"


def run(
    data: Path, out: Path, recipe: Recipe, *, resume: bool = False, device: str = "auto"
) -> dict[str, Any]:
    """Train by a recipe, and write a folder that the service loads.

    Recipe, data, checkpoint and folder are checked before the first step.

    Args:
        data: folder with CIFAR-10's binary files, or with one folder of pictures per class.
        out: folder for the results, created if absent.
        recipe: the choices of the run.
        resume: continue the run in `out`. A complete run is only measured and written again.
        device: see `model.runtime.device.choose_device`.

    Returns:
        The run's record as JSON types, which is also in the checkpoint's config under `training`.

    Raises:
        DatasetError: the data cannot be read or trained on.
        CheckpointError: the checkpoint to start from cannot be read.
        DeviceError: the device is not available here.
        TrainingError: `out` is not empty, or lacks a run that this recipe can resume. Or the recipe
            does not fit the data, or training diverged.
    """
    training_device = choose_device(device)
    dataset = open_dataset(data, recipe.validation, recipe.seed)
    run_folder.prepare_folder(out, data, resume=resume)
    start = start_from(recipe, len(dataset.labels), dataset.image_size)
    count = len(dataset.train)
    if count < recipe.batch_size:
        raise TrainingError(
            f"recipe: batch_size {recipe.batch_size}: there are only {count} training images; "
            f"--batch-size {count} fits"
        )
    sizes = (len(dataset.labels), len(dataset.train), len(dataset.validation))
    logger.info("%s: %d classes, %d images to train on, %d to validate on", data, *sizes)
    split = _record_start(out, recipe, dataset)
    train = decode(dataset.train, _training_size(recipe, start, dataset), out)
    validation = decode(dataset.validation, start.preprocess, out)
    test = None
    if dataset.test is not None:
        test = decode(dataset.test, start.preprocess, out)
    if start.weights is None:
        mean, std = channel_statistics(train.pixels)
        start = replace(
            start, preprocess=start.preprocess.model_copy(update={"mean": mean, "std": std})
        )
    training = TrainingData(train, validation, start.preprocess.mean, start.preprocess.std)
    trainer = Trainer(recipe, start.config, training, out, training_device, start.weights)
    if resume and (out / run_folder.STATE_FILE).exists():
        trainer.load()
    best = trainer.run(_log_epoch)
    checkpoint = rounded(
        Checkpoint(
            name=recipe.name,
            source=str(out),
            format=native.FORMAT,
            architecture=native.describe_architecture(start.config),
            config=start.config,
            preprocess=start.preprocess,
            labels=dataset.labels,
            tensors=best.weights,
        )
    )
    # It has exactly the numbers that will be served, without a temperature.
    predictor = Predictor(checkpoint, device=device, compile_mode="off", dtype="float32")
    logits = predict_logits(predictor, validation.pixels)
    checkpoint = calibrated(checkpoint, logits, validation.labels)
    measured = _evaluation(checkpoint, logits, validation)
    reported = measured
    record = _record(trainer, start, dataset, checkpoint) | {
        "validation": measured.record(),
        "test": None,
    }
    if test is not None:
        reported = _evaluation(checkpoint, predict_logits(predictor, test.pixels), test)
        record["test"] = reported.record()
    _write(out, checkpoint, record, reported)
    leaks = split.count_leaks(VALIDATION if test is None else TEST)
    which = f", of which {leaks} were trained on" if leaks else " that were not trained on"
    text = "%s: accuracy %.2f%% of %d images%s, after %.0f s of training"
    logger.info(text, data, 100 * reported.accuracy, reported.count, which, record["seconds"])
    return record


def _write(
    out: Path, checkpoint: Checkpoint, record: dict[str, Any], evaluation: Evaluation
) -> None:
    """Write the files of a finished run."""
    # `native.write` writes the config last, so that the service never loads half a folder.
    run_folder.write_confusion(out, evaluation, checkpoint.labels)
    run_folder.write_text(out / run_folder.CARD_FILE, run_folder.model_card(record, checkpoint))
    native.write(out, checkpoint, dtype=STORED_DTYPE, training=record)
    # It was measured with the rounded weights, so it is valid for every dtype.
    if checkpoint.calibration is not None:
        native.write_calibration(out, checkpoint.calibration)


def _record_start(out: Path, recipe: Recipe, dataset: Dataset) -> SplitRecord:
    """Write the recipe and the split, and warn if measured pictures were trained on."""
    split = SplitRecord.of(dataset.sets(), SplitRecord.read(recipe.checkpoint))
    run_folder.record_start(out, recipe, split)
    split.log_leaks(recipe.checkpoint)
    split.log_contradictions(dataset.sets(), dataset.labels)
    return split


def start_from(recipe: Recipe, classes: int, image_size: Size | None) -> Start:
    """Return the model that a recipe starts with.

    Args:
        recipe: names a checkpoint or an architecture.
        classes: number of classes of the new head.
        image_size: (rows, columns) of the data's pictures; None if sizes differ.

    Raises:
        CheckpointError: the checkpoint cannot be read or resized.
        TrainingError: the recipe names neither, or does not fit the data.
    """
    if recipe.checkpoint is not None:
        return _from_checkpoint(recipe, recipe.checkpoint, classes)
    if recipe.architecture is None:
        raise TrainingError(
            "recipe: neither an architecture to train from scratch nor a checkpoint to fine-tune"
        )
    size = recipe.image_size or image_size
    if size is None:
        raise TrainingError(
            "recipe: image_size: needed to train from scratch on pictures of any size"
        )
    half = (0.5, 0.5, 0.5)
    preprocess = PreprocessConfig(
        size=size,
        resize="shortest_edge",
        resize_size=size,
        interpolation="bicubic",
        mean=half,
        std=half,
    )
    return Start(recipe.architecture.config(size, classes), preprocess)


def read_start(recipe: Recipe, source: str) -> Checkpoint:
    """Read the checkpoint that a recipe starts from.

    Raises:
        CheckpointError: the checkpoint cannot be read or resized.
    """
    # The head is replaced, so its labels are not needed. Some formats lack them.
    return load_checkpoint(source, image_size=recipe.image_size, labels="numbers")


def _from_checkpoint(recipe: Recipe, source: str, classes: int) -> Start:
    checkpoint = read_start(recipe, source)
    if checkpoint.vit.in_channels != 3:
        raise TrainingError(
            f"{source}: takes greyscale pictures; only models of RGB pictures can be fine-tuned"
        )
    config = checkpoint.vit.model_copy(update={"num_classes": classes})
    weights = dict(checkpoint.build().state_dict())  # `build` checks all of them
    for name in [name for name in weights if name.startswith(("head.", "head_dist."))]:
        weights[name] = torch.zeros(classes, *weights[name].shape[1:])
    return Start(config, checkpoint.preprocess, weights, checkpoint.name)


def rounded(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with exactly the numbers on disk, float32, at temperature 1."""
    tensors = {
        name: tensor.detach().cpu().to(STORED_DTYPE).float()
        for name, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors, temperature=1.0)


def calibrated(
    checkpoint: Checkpoint, logits: NDArray[np.float32], truth: NDArray[np.int64]
) -> Checkpoint:
    """Return a checkpoint with fitted scores and a calibration, if there are enough images.

    Args:
        checkpoint: the checkpoint at temperature 1.
        logits: logits of validation images, [N, K].
        truth: their classes, int64 [N].
    """
    if len(truth) < MIN_PICTURES:
        return checkpoint
    fit, _ = choose_fit(logits, truth, Fit(1.0))
    calibration = calibration_of("the validation images", logits, truth, fit)
    return replace(checkpoint, temperature=fit.temperature, form=fit.form, calibration=calibration)


def _training_size(recipe: Recipe, start: Start, dataset: Dataset) -> PreprocessConfig:
    """Return the preprocessing of stored training pictures, which are larger if crops are resized.

    A larger picture is a centre crop with the whole shorter side.
    """
    preprocess = start.preprocess
    if not recipe.augmentation.resized_crop:
        return preprocess
    rows, columns = dataset.image_size or tuple(round(side * MARGIN) for side in preprocess.size)
    size = (rows, columns)
    return preprocess.model_copy(update={"size": size, "resize_size": size, "crop_pct": None})


def _evaluation(checkpoint: Checkpoint, logits: NDArray[np.float32], images: Images) -> Evaluation:
    return measure(checkpoint.head.scores(logits), images.labels, checkpoint.labels)


def _record(
    trainer: Trainer, start: Start, dataset: Dataset, checkpoint: Checkpoint
) -> dict[str, Any]:
    """Return the record of a run and of its teacher, as JSON types."""
    teacher = trainer.teacher
    assert trainer.best is not None
    return {
        "recipe": trainer.recipe.model_dump(mode="json"),
        "data": dataset.name,
        "started_from": start.name,
        "kept_epoch": trainer.best.epoch,
        "images": len(dataset.train),
        "validation_images": len(dataset.validation),
        "seconds": trainer.seconds + (0.0 if teacher is None else teacher["seconds"]),
        "teacher": teacher,
        "device": run_folder.describe_device(trainer.device),
        "precision": str(trainer.arithmetic.dtype).removeprefix("torch."),
        "parameters": count_parameters(trainer.model),
        "versions": run_folder.installed_versions(),
        "temperature": checkpoint.temperature,
        "form": checkpoint.form.model_dump(),
    }


def _log_epoch(metrics: run_folder.EpochMetrics) -> None:
    text = (
        "epoch {epoch}: loss {train_loss:.3f}, accuracy {train_accuracy:.2%}, validation accuracy "
        "{validation_accuracy:.2%}, {images_per_second:.0f} images/s, {seconds:.0f} s"
    )
    logger.info("%s", text.format(**metrics))
