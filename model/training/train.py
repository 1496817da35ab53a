"""Fine-tuning of a checkpoint on a folder of pictures: from both to a folder that the service loads.

    data -> train -> half precision -> temperature -> test set, once -> config, weights

The test set is measured after the last choice is made: weights, temperature and recipe are fixed by then.
"""

from __future__ import annotations

import csv
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.calibration import MIN_PICTURES, SOFTMAX, Fit, calibration_of, choose_fit, scores_and_energies
from model.checkpoint import Checkpoint, load_checkpoint, native
from model.config import NetworkConfig
from model.data.datasets import open_dataset
from model.data.pictures import Images, decode
from model.errors import TrainingError
from model.evaluation.evaluate import Evaluation, measure, predict_logits
from model.network.vit import HEADS
from model.runtime.device import choose_device
from model.runtime.predictor import Predictor
from model.training.loop import MARGIN, fine_tune
from model.training.recipe import Recipe

logger = logging.getLogger(__name__)

# Dtype of the weights on disk.
STORED_DTYPE: Final = torch.float16


def run(data: Path, out: Path, recipe: Recipe, *, device: str = "auto") -> dict[str, Any]:
    """Train by a recipe and leave a servable folder: weights, config, confusion matrix.

    Recipe, data, checkpoint and folder are checked before the first step.

    Args:
        data: folder with a folder of pictures for each class, or with the binary version of CIFAR-10.
        out: folder for the results; made if absent.
        device: see `model.runtime.device.choose_device`.

    Returns:
        The run's record as JSON types, which goes into the checkpoint's config under `training`.

    Raises:
        DatasetError: the data cannot be read or trained on.
        CheckpointError: the checkpoint to start from cannot be read.
        DeviceError: the device is not available here.
        TrainingError: `out` holds something already; the recipe does not fit the data; or training diverged.
    """
    training_device = choose_device(device)
    dataset = open_dataset(data, recipe.validation, recipe.seed)
    prepare_folder(out, data)
    start = start_from(recipe, dataset.labels)
    if (count := len(dataset.train)) < recipe.batch_size:
        raise TrainingError(f"recipe: batch_size {recipe.batch_size}: there are only {count} training images")
    sizes = (len(dataset.labels), len(dataset.train), len(dataset.validation))
    logger.info("%s: %d classes, %d images to train on, %d to validate on", data, *sizes)
    # Like the model's own picture a picture to train on is a centre crop, but of all that the crop leaves of the
    # shorter side, and larger.
    size = tuple(round(side * MARGIN) for side in start.preprocess.size)
    larger = start.preprocess.model_copy(update={"size": size, "resize_size": size})
    train, validation = decode(dataset.train, larger), decode(dataset.validation, start.preprocess)
    test = None if dataset.test is None else decode(dataset.test, start.preprocess)
    began = time.monotonic()
    weights, losses = fine_tune(start, recipe, train, training_device)
    seconds, architecture = time.monotonic() - began, native.describe_architecture(start.config)
    checkpoint = rounded(replace(start, name=recipe.name, source=str(out), architecture=architecture, tensors=weights))
    # The very numbers that will be served, without a temperature.
    predictor = Predictor(checkpoint, device=device, compile_mode="off", dtype="float32")
    logits = predict_logits(predictor, validation.pixels)
    checkpoint = calibrated(checkpoint, logits, validation.labels)
    reported = measured = _measure(logits, validation, checkpoint)
    record: dict[str, Any] = {
        "recipe": recipe.model_dump(mode="json"),
        "data": dataset.name,
        "started_from": start.name,
        "losses": losses,
        "images": len(train),
        "validation_images": len(validation),
        "seconds": seconds,
        "versions": installed_versions(),
        "temperature": checkpoint.temperature,
        "form": checkpoint.form.model_dump(),
        "validation": measured.record(),
        "test": None,
    }
    if test is not None:
        reported = _measure(predict_logits(predictor, test.pixels), test, checkpoint)
        record["test"] = reported.record()
    # The folder is servable when all else is written, and not before.
    write_confusion(out, reported, checkpoint.labels)
    native.write(out, checkpoint, dtype=STORED_DTYPE, training=record)
    if checkpoint.calibration is not None:  # of the rounded weights, so it holds for them in any dtype
        native.write_calibration(out, checkpoint.calibration)
    text = "%s: accuracy %.2f%% of %d images that were not trained on, after %.0f s of training"
    logger.info(text, data, 100 * reported.accuracy, reported.count, seconds)
    return record


def start_from(recipe: Recipe, labels: tuple[str, ...]) -> Checkpoint:
    """Return the checkpoint that is fine-tuned, with a new head for these labels, which starts at zero.

    Raises:
        CheckpointError: the checkpoint cannot be read, or not be resized.
        TrainingError: it is of greyscale pictures.
    """
    checkpoint = read_start(recipe)
    if checkpoint.vit.in_channels != 3:
        raise TrainingError(
            f"{recipe.checkpoint}: takes greyscale pictures; only models of RGB pictures can be fine-tuned"
        )
    config = checkpoint.vit.model_copy(update={"num_classes": len(labels)})
    weights = dict(checkpoint.build().state_dict())  # built, so that all of them are checked
    for name in [name for name in weights if name.startswith(HEADS)]:
        weights[name] = torch.zeros(len(labels), *weights[name].shape[1:])
    return relabelled(checkpoint, config, labels, weights)


def read_start(recipe: Recipe) -> Checkpoint:
    """Read the checkpoint that a recipe starts from, whose head is to be replaced.

    Raises:
        CheckpointError: it cannot be read, or not be resized, or is no Vision Transformer.
    """
    # The old head's labels go with it, and some formats have none.
    checkpoint = load_checkpoint(recipe.checkpoint, image_size=recipe.image_size, labels="numbers")
    return replace(checkpoint, config=checkpoint.vit)


def relabelled(
    checkpoint: Checkpoint, config: NetworkConfig, labels: tuple[str, ...], tensors: Mapping[str, Tensor]
) -> Checkpoint:
    """Return a checkpoint with other classes, whose scores are a plain softmax, as it is written."""
    return replace(
        checkpoint,
        format=native.FORMAT,
        config=config,
        labels=labels,
        tensors=tensors,
        temperature=1.0,
        form=SOFTMAX,
        multi_label=False,
        zero_shot=None,
        embed_texts=None,
        calibration=None,
    )


def rounded(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the very numbers that are stored and served, float32, and without its temperature."""
    tensors = {name: tensor.detach().cpu().to(STORED_DTYPE).float() for name, tensor in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors, temperature=1.0)


def calibrated(checkpoint: Checkpoint, logits: NDArray[np.float32], truth: NDArray[np.int64]) -> Checkpoint:
    """Return a checkpoint with fitted scores and, if there are enough images, what makes sets of labels.

    Args:
        logits: [N, K], of validation images at temperature 1.
        truth: int64 [N], their classes.
    """
    if len(truth) < MIN_PICTURES:
        return checkpoint
    fit, _ = choose_fit(logits, truth, Fit(1.0))
    calibration = calibration_of("the validation images", logits, truth, fit)
    return replace(checkpoint, temperature=fit.temperature, form=fit.form, calibration=calibration)


def _measure(logits: NDArray[np.float32], images: Images, checkpoint: Checkpoint) -> Evaluation:
    """Evaluate logits [N, K] by the checkpoint's scores."""
    scores, _ = scores_and_energies(logits, checkpoint.temperature, checkpoint.form)
    return measure(scores.astype(np.float32), images.labels, checkpoint.labels)


def prepare_folder(out: Path, data: Path) -> None:
    """Make the folder of a run; raises TrainingError where it lies in the data, or holds something already."""
    if out.resolve().is_relative_to(data.resolve()):
        raise TrainingError(f"{out}: lies in the data, where it would be taken for a class; choose another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        there = min((path.name for path in out.iterdir()), default=None)
    except OSError as error:
        raise TrainingError(f"{out}: cannot be made: {error.strerror}") from error
    if there is not None:
        raise TrainingError(f"{out}: is not empty ({there}); choose another folder")


def write_confusion(out: Path, measured: Evaluation, labels: Sequence[str]) -> None:
    """Write the confusion matrix as CSV: a row a class, a column an answer."""
    with (out / "confusion_matrix.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["truth", *labels])
        writer.writerows([label, *row] for label, row in zip(labels, measured.confusion, strict=True))


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the numbers."""
    packages = ("vitserve", "torch", "numpy", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
