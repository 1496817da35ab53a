"""Training from a folder of pictures and a recipe to a folder that the service loads.

    data -> train -> half precision -> temperature -> test set, once -> config, weights, model card

The test set is measured after the last choice is made: weights, temperature and recipe are fixed by
then.
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

from model.calibration import Fit, scores_and_energies
from model.checkpoint import Checkpoint, load_checkpoint, native
from model.config import PreprocessConfig, ViTConfig
from model.errors import TrainingError
from model.extensions.datasets.pictures import Images, channel_statistics, decode
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
        preprocess: preprocessing of the service; from scratch, mean and std are measured later.
        weights: float32 on the CPU by name; None from scratch.
        name: name of the checkpoint that is fine-tuned; None from scratch.
    """

    config: ViTConfig
    preprocess: PreprocessConfig
    weights: Mapping[str, Tensor] | None = None
    name: str | None = None


def default_recipe(data: Path, checkpoint: str | None) -> Path:
    """Return the bundled recipe for data of this kind: from scratch, or to fine-tune a checkpoint.

    Raises:
        TrainingError: a folder of pictures, and no checkpoint.
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
    """Train by a recipe and leave a servable folder: weights, config, model card, metrics.

    Recipe, data, checkpoint and folder are checked before the first step.

    Args:
        data: folder with the binary version of CIFAR-10, or with a folder of pictures for each
        class.
        out: folder for the results; made if absent.
        resume: continue the run that `out` holds; a complete run is only measured and written anew.
        device: see `model.runtime.device.choose_device`.

    Returns:
        The run's record as JSON types, which goes into the checkpoint's config under `training`.

    Raises:
        DatasetError: the data cannot be read or trained on.
        CheckpointError: the checkpoint to start from cannot be read.
        DeviceError: the device is not available here.
        TrainingError: `out` holds something already and `resume` is false, or nothing that this
            recipe could continue; the recipe does not fit the data; or training diverged.
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
    _record_start(out, recipe, dataset)
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
    # The very numbers that will be served, without a temperature.
    predictor = Predictor(checkpoint, device=device, compile_mode="off", dtype="float32")
    logits = predict_logits(predictor, validation.pixels)
    checkpoint = calibrated(checkpoint, logits, validation.labels)
    measured = _measure(logits, validation, checkpoint)
    reported = measured
    record = _record(trainer, start, dataset, checkpoint) | {
        "validation": measured.record(),
        "test": None,
    }
    if test is not None:
        reported = _measure(predict_logits(predictor, test.pixels), test, checkpoint)
        record["test"] = reported.record()
    _write(out, checkpoint, record, reported)
    text = "%s: accuracy %.2f%% of %d images that were not trained on, after %.0f s of training"
    logger.info(text, data, 100 * reported.accuracy, reported.count, record["seconds"])
    return record


def _write(
    out: Path, checkpoint: Checkpoint, record: dict[str, Any], evaluation: Evaluation
) -> None:
    """Write the files of a finished run."""
    # The config is written last, so that the service never loads half a folder.
    run_folder.write_confusion(out, evaluation, checkpoint.labels)
    run_folder.write_text(out / run_folder.CARD_FILE, run_folder.model_card(record, checkpoint))
    native.write(out, checkpoint, dtype=STORED_DTYPE, training=record)
    if checkpoint.calibration is not None:  # of the rounded weights, so valid for any dtype
        native.write_calibration(out, checkpoint.calibration)


def _record_start(out: Path, recipe: Recipe, dataset: Dataset) -> None:
    """Write the recipe and the split.

    Warn if the run or its start trains on pictures that the run measures on.
    """
    split = SplitRecord.of(dataset.sets(), SplitRecord.read(recipe.checkpoint))
    run_folder.record_start(out, recipe, split)
    split.log_leaks(recipe.checkpoint)
    split.log_contradictions(dataset.sets(), dataset.labels)


def start_from(recipe: Recipe, classes: int, image_size: Size | None) -> Start:
    """Make a recipe's start for data of `classes` classes.

    Args:
        classes: number of classes of the new head.
        image_size: (rows, columns) of the data's pictures; None if sizes differ.

    Raises:
        CheckpointError: the checkpoint cannot be read, or not be resized.
        TrainingError: the recipe has neither a checkpoint nor an architecture, or it does not fit
            the data.
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
    """Read the checkpoint that a recipe starts from, whose head is to be replaced.

    Raises:
        CheckpointError: it cannot be read, or not be resized.
    """
    # The old head's labels are not needed, and some formats lack labels.
    return load_checkpoint(source, image_size=recipe.image_size, labels="numbers")


def _from_checkpoint(recipe: Recipe, source: str, classes: int) -> Start:
    checkpoint = read_start(recipe, source)
    if checkpoint.vit.in_channels != 3:
        raise TrainingError(
            f"{source}: takes greyscale pictures; only models of RGB pictures can be fine-tuned"
        )
    config = checkpoint.vit.model_copy(update={"num_classes": classes})
    weights = dict(checkpoint.build().state_dict())  # built, so that all of them are checked
    for name in [name for name in weights if name.startswith(("head.", "head_dist."))]:
        weights[name] = torch.zeros(classes, *weights[name].shape[1:])
    return Start(config, checkpoint.preprocess, weights, checkpoint.name)


def rounded(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with exactly the stored numbers, float32, at temperature 1."""
    tensors = {
        name: tensor.detach().cpu().to(STORED_DTYPE).float()
        for name, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors, temperature=1.0)


def calibrated(
    checkpoint: Checkpoint, logits: NDArray[np.float32], truth: NDArray[np.int64]
) -> Checkpoint:
    """Return a checkpoint with fitted scores and, with enough images, a calibration of label sets.

    Args:
        logits: [N, K], of validation images at temperature 1.
        truth: int64 [N], their classes.
    """
    if len(truth) < MIN_PICTURES:
        return checkpoint
    fit, _ = choose_fit(logits, truth, Fit(1.0))
    calibration = calibration_of("the validation images", logits, truth, fit)
    return replace(checkpoint, temperature=fit.temperature, form=fit.form, calibration=calibration)


def _training_size(recipe: Recipe, start: Start, dataset: Dataset) -> PreprocessConfig:
    """Return the size of stored training pictures.

    It is the model's input size, or larger if random parts are resized.

    Like the model's own picture a larger picture is a centre crop, but of all that the crop leaves
    of the shorter side.
    """
    preprocess = start.preprocess
    if not recipe.augmentation.resized_crop:
        return preprocess
    rows, columns = dataset.image_size or tuple(round(side * MARGIN) for side in preprocess.size)
    size = (rows, columns)
    return preprocess.model_copy(update={"size": size, "resize_size": size, "crop_pct": None})


def _measure(logits: NDArray[np.float32], images: Images, checkpoint: Checkpoint) -> Evaluation:
    """Evaluate logits [N, K] by the checkpoint's scores."""
    scores, _ = scores_and_energies(logits, checkpoint.temperature, checkpoint.form)
    return measure(scores.astype(np.float32), images.labels, checkpoint.labels)


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
