"""From a folder of pictures and a recipe to a folder that the service loads.

    data -> train -> half precision -> temperature -> test set, once -> config, weights, model card

The test pictures are measured after the last choice is made: weights, temperature and recipe are fixed by then.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from model.checkpoint import Checkpoint, native
from model.config import PreprocessConfig
from model.data.datasets import SPLIT_FILE, Dataset, Folder, is_cifar10, open_dataset
from model.data.decoding import MEMORY
from model.data.labelled_images import Images, channel_statistics
from model.errors import TrainingError
from model.runtime.device import choose_device
from model.training.export import STORED, log_scores, measure_logits, round_and_calibrate
from model.training.folder_lock import folder_lock
from model.training.loop import STATE_FILE, Trainer
from model.training.metrics import METRICS_FILE, EpochMetrics
from model.training.recipe import RECIPES, Recipe
from model.training.recipe_toml import to_toml
from model.training.report.figures import write_figures
from model.training.report.model_card import model_card
from model.training.run_record import RunRecord
from model.training.start import Start, start_from
from model.training.training_data import TrainingData

logger = logging.getLogger(__name__)

CARD_FILE: Final = "MODEL_CARD.md"
RECIPE_FILE: Final = "recipe.toml"
LAST_FOLDER: Final = "last"
_BEGUN: Final = frozenset({RECIPE_FILE, SPLIT_FILE, METRICS_FILE})
"""What a run that was ended before its first epoch may have left behind."""

_MARGIN: Final = 256 / 224
"""Training pictures that random parts are resized from are kept larger than the model's input by this much."""


def default_recipe(data: Path, checkpoint: str | None) -> Path:
    """The bundled recipe for data of this kind: from scratch, or to fine-tune a checkpoint."""
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

    Everything that can be wrong with recipe, data, checkpoint and folder is found before the first step.

    Args:
        data: folder with the binary version of CIFAR-10, or with one folder of pictures a class.
        out: folder for the results; made if absent.
        recipe: what to do.
        resume: continue the run that `out` holds; one that is complete is only measured and written anew.
        device: see `model.runtime.device.choose_device`.
        memory: bytes of decoded pictures up to which they are kept in memory; more go to a file in `out`.
        progress: show bars.

    Raises:
        DatasetError: the data cannot be read or trained on.
        CheckpointError: the checkpoint to start from cannot be read.
        DeviceError: the device is not available here.
        TrainingError: `out` holds something already and `resume` is false, or nothing that this recipe could
            continue; another run is under way there; the recipe does not fit the data; or training diverged.
    """
    where = choose_device(device)
    dataset = open_dataset(data, recipe.validation, recipe.seed)
    _check_folder(out, dataset, data, resume)
    with folder_lock(out):
        return _run(data, out, recipe, dataset, where, resume=resume, device=device, memory=memory, progress=progress)


def _run(
    data: Path,
    out: Path,
    recipe: Recipe,
    dataset: Dataset,
    where: torch.device,
    *,
    resume: bool,
    device: str,
    memory: int,
    progress: bool,
) -> RunRecord:
    start = start_from(recipe, len(dataset.labels), dataset.image_size)
    if dataset.train_count < recipe.batch_size:
        raise TrainingError(
            f"recipe: batch_size {recipe.batch_size}: there are only {dataset.train_count} training images"
        )
    logger.info(
        "%s: %d classes, %d images to train on, %d to validate on",
        data,
        len(dataset.labels),
        dataset.train_count,
        dataset.validation_count,
    )
    _begin(out, recipe, dataset, resume)
    train, validation = dataset.load(
        _training_size(recipe, start, dataset), start.preprocess, out, memory=memory, progress=progress
    )
    if start.weights is None:
        mean, std = channel_statistics(train.pixels)
        start = replace(start, preprocess=start.preprocess.model_copy(update={"mean": mean, "std": std}))
    trainer = Trainer(
        recipe,
        start.config,
        TrainingData(
            *_tensors(train, where),
            *_tensors(validation, where),
            mean=start.preprocess.mean,
            std=start.preprocess.std,
        ),
        out,
        where,
        initial=start.weights,
    )
    if resume and (out / STATE_FILE).exists():
        trainer.load()
        write_text(out / RECIPE_FILE, to_toml(recipe))
    trainer.run(_log_epoch, progress=progress)
    return _export(trainer, start, dataset, validation, data, out, device=device, progress=progress)


def _check_folder(out: Path, dataset: Dataset, data: Path, resume: bool) -> None:
    if isinstance(dataset, Folder) and out.resolve().is_relative_to(data.resolve()):
        raise TrainingError(f"{out}: lies in the data, where it would be taken for a class; choose another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in out.iterdir()}
    except OSError as error:
        raise TrainingError(f"{out}: cannot be made: {error.strerror}") from error
    if resume:
        if not there & {STATE_FILE, RECIPE_FILE}:
            raise TrainingError(f"{out}: nothing to resume: no {STATE_FILE}")
    elif STATE_FILE in there:
        raise TrainingError(f"{out}: holds a run already; resume it or choose another folder")
    elif there - _BEGUN:
        raise TrainingError(f"{out}: is not empty ({min(there - _BEGUN)}); choose another folder")


def _begin(out: Path, recipe: Recipe, dataset: Dataset, resume: bool) -> None:
    """Write down what is about to be done, or see that what goes on is the same.

    Raises:
        TrainingError: the pictures or their split are not those that the run began with; or nothing can be written.
    """
    split = dataset.split()
    goes_on = resume and (out / STATE_FILE).exists()
    try:
        if split is not None:
            path = out / SPLIT_FILE
            if goes_on and path.exists() and path.read_text(encoding="utf-8") != split:
                raise TrainingError(f"{path}: the data now hold other files, or split them otherwise; start afresh")
            write_text(path, split)
        if not goes_on:  # else the state says whether this recipe is the same
            write_text(out / RECIPE_FILE, to_toml(recipe))
    except OSError as error:
        raise TrainingError(f"{out}: cannot be written to: {error.strerror}") from error


def _training_size(recipe: Recipe, start: Start, dataset: Dataset) -> PreprocessConfig:
    """How training pictures are stored: as the model sees them, or where random parts are resized anew, larger.

    Like the model's own picture a larger one is a centre crop, but of all that the crop leaves of the shorter side.
    """
    preprocess = start.preprocess
    if not recipe.augmentation.resized_crop:
        return preprocess
    rows, columns = dataset.image_size or tuple(round(side * _MARGIN) for side in preprocess.size)
    return preprocess.model_copy(update={"size": (rows, columns), "resize_size": (rows, columns)})


def _export(
    trainer: Trainer,
    start: Start,
    dataset: Dataset,
    validation: Images,
    data: Path,
    out: Path,
    *,
    device: str,
    progress: bool,
) -> RunRecord:
    """Round, calibrate, measure, write; the folder is servable when all else is written, and not before."""
    recipe = trainer.recipe

    def checkpoint(weights: Mapping[str, Tensor]) -> Checkpoint:
        return Checkpoint(
            name=recipe.name,
            source=str(out),
            format=native.FORMAT,
            architecture=native.describe_architecture(start.config),
            config=start.config,
            preprocess=start.preprocess,
            labels=dataset.labels,
            tensors=weights,
        )

    last = round_and_calibrate(checkpoint(trainer.weights), validation, device=device, progress=progress)
    kept, kept_epoch = last, trainer.epoch
    if recipe.keep == "best" and trainer.best_epoch != trainer.epoch:
        kept_epoch = trainer.best_epoch
        kept = round_and_calibrate(checkpoint(trainer.best_weights), validation, device=device, progress=progress)
    final = kept.checkpoint
    test = test_uncalibrated = None
    if dataset.has_test:
        images = dataset.load_test(start.preprocess, out, progress=progress)
        logits = log_scores(kept.predictor, images, progress=progress)
        test = measure_logits(logits, images, final.temperature, dataset.labels)
        test_uncalibrated = measure_logits(logits, images, 1.0, dataset.labels)
    result = RunRecord(
        recipe=recipe,
        data=dataset.name,
        started_from=start.name,
        kept_epoch=kept_epoch,
        epochs=trainer.epochs_trained,
        images=dataset.train_count,
        validation_images=dataset.validation_count,
        seconds=trainer.seconds,
        device=describe_device(trainer.device),
        precision=str(trainer.dtype).removeprefix("torch."),
        parameters=kept.predictor.parameters,
        versions=_versions(),
        temperature=final.temperature,
        validation=kept.validation,
        validation_uncalibrated=kept.validation_uncalibrated,
        test=test,
        test_uncalibrated=test_uncalibrated,
    )
    native.write(out / LAST_FOLDER, last.checkpoint, dtype=STORED, training={"epoch": trainer.epoch})
    pictures = write_figures(out, test or kept.validation, dataset.labels, trainer.history)
    write_text(out / CARD_FILE, model_card(result, final, pictures))
    native.write(out, final, dtype=STORED, training=result.record())
    logger.info(
        "%s: %s accuracy %.2f%% after %.0f s of training; serve it with VIT_CHECKPOINT=%s",
        data,
        "validation" if test is None else "test",
        100 * (test or kept.validation).accuracy,
        result.seconds,
        out,
    )
    return result


def describe_device(device: torch.device) -> str:
    """A device as a person names it: `NVIDIA H100 80GB HBM3`, or `AMD EPYC 9454 (2 threads)`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name} ({torch.get_num_threads()} threads)"


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, whole."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _versions() -> dict[str, str]:
    packages = ("vitserve", "torch", "numpy", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _tensors(images: Images, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pixels and labels on the device if they leave half of what is free there, else where they are."""
    if device.type == "cuda" and images.pixels.nbytes > torch.cuda.mem_get_info(device)[0] // 2:
        device = torch.device("cpu")
    return torch.from_numpy(images.pixels).to(device), torch.from_numpy(images.labels).to(device)


def _log_epoch(metrics: EpochMetrics) -> None:
    validation = (
        "" if metrics.validation_accuracy is None else f", validation accuracy {metrics.validation_accuracy:.2%}"
    )
    logger.info(
        "epoch %d: loss %.3f, accuracy %.2f%%%s, %.0f images/s, %.0f s",
        metrics.epoch,
        metrics.train_loss,
        100 * metrics.train_accuracy,
        validation,
        metrics.images_per_second,
        metrics.seconds,
    )
