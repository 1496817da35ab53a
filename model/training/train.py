"""From a folder of CIFAR-10 and a recipe to a folder that the service loads.

    data -> train -> half precision -> temperature -> test set, once -> config, weights, model card

The test pictures are read after the last choice is made: weights, temperature and recipe are fixed by then.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.checkpoint import Checkpoint, load_checkpoint, native
from model.config import PreprocessConfig
from model.device import choose_device
from model.errors import TrainingError
from model.predictor import Predictor
from model.training import cifar10
from model.training.calibration import fit_temperature
from model.training.card import model_card
from model.training.evaluate import Evaluation, measure, predict_scores
from model.training.loop import STATE_FILE, Data, EpochMetrics, Trainer
from model.training.recipe import RECIPES, Recipe

logger = logging.getLogger(__name__)

DEFAULT_RECIPE: Final = RECIPES / "cifar10.toml"
CARD_FILE: Final = "MODEL_CARD.md"
_STORED: Final = torch.float16


@dataclass(frozen=True)
class Run:
    """What came of a run; written into the checkpoint's `training` record and told by its card.

    Attributes:
        recipe: what was asked for.
        data: what it was trained on: `CIFAR-10`, or the name of a folder of pictures.
        started_from: name of the checkpoint that was fine-tuned; None: trained from scratch.
        kept_epoch: the epoch whose weights are kept.
        epochs: as far as training came; the last may be a part of one when the recipe bounds the time.
        images: training images; `held_out_images` were set aside from the same files.
        seconds: wall time of training, evaluations on the held-out images included.
        device: what it ran on. `precision`: dtype of activations and gradients there.
        parameters: of the model.
        versions: of Python and the packages that matter.
        temperature: fitted on the held-out images.
        held_out, held_out_uncalibrated: measured with it and without it (temperature 1).
        test, test_uncalibrated: the same on the test images; None where the data have none.
    """

    recipe: Recipe
    data: str
    started_from: str | None
    kept_epoch: int
    epochs: float
    images: int
    held_out_images: int
    seconds: float
    device: str
    precision: str
    parameters: int
    versions: Mapping[str, str]
    temperature: float
    held_out: Evaluation
    held_out_uncalibrated: Evaluation
    test: Evaluation | None
    test_uncalibrated: Evaluation | None

    def record(self) -> dict[str, Any]:
        """As JSON types."""
        measured = ("held_out", "held_out_uncalibrated", "test", "test_uncalibrated")
        return {
            **asdict(self),
            "recipe": self.recipe.model_dump(mode="json"),
            "versions": dict(self.versions),
            **{name: one.record() for name in measured if (one := getattr(self, name)) is not None},
        }


def run(
    data: Path, out: Path, recipe: Recipe, *, resume: bool = False, device: str = "auto", progress: bool = True
) -> Run:
    """Train by a recipe and leave a servable folder: weights, config, model card, metrics.

    Args:
        data: folder with the binary version of CIFAR-10.
        out: folder for the results; made if absent.
        recipe: what to do.
        resume: continue the run that `out` holds; one that is complete is only measured and written anew.
        device: see `model.device.choose_device`.
        progress: show bars.

    Raises:
        DatasetError: the data cannot be read.
        DeviceError: the device is not available here.
        TrainingError: `out` holds a run already and `resume` is false, or none that this recipe could
            continue; or training diverged.
    """
    if not resume and (out / STATE_FILE).exists():
        raise TrainingError(f"{out}: holds a run already; resume it or choose another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"{out}: cannot be made: {error.strerror}") from error
    if recipe.architecture is None:
        raise TrainingError("recipe: architecture: needed to train from scratch")
    where = choose_device(device)
    labels = cifar10.read_labels(data)
    train, held_out = cifar10.hold_out(cifar10.read_train(data), int(recipe.held_out), recipe.seed)
    mean, std = channel_statistics(train.pixels)
    trainer = Trainer(
        recipe,
        recipe.architecture.config(cifar10.IMAGE_SIZE, cifar10.CLASSES),
        Data(*_tensors(train, where), *_tensors(held_out, where), mean=mean, std=std),
        out,
        where,
    )
    if resume:
        trainer.load()
    trainer.run(_log_epoch, progress=progress)

    checkpoint = Checkpoint(
        name=recipe.name,
        source=str(out),
        format=native.FORMAT,
        architecture=native.describe_architecture(trainer.config),
        config=trainer.config,
        preprocess=PreprocessConfig(
            size=cifar10.IMAGE_SIZE,
            resize="shortest_edge",
            resize_size=cifar10.IMAGE_SIZE,
            interpolation="bicubic",
            mean=mean,
            std=std,
        ),
        labels=labels,
        tensors=trainer.weights,
    )
    native.write(out, checkpoint, dtype=_STORED)
    # Read back: what is measured from here on are the rounded weights that will be served.
    stored = load_checkpoint(str(out))
    predictor = Predictor(stored, device=device, dtype="float32", compile_mode="off")
    held_out_logits = log_scores(predictor, held_out.pixels, progress=progress)
    temperature = fit_temperature(held_out_logits, torch.from_numpy(held_out.labels))
    test = cifar10.read_test(data)
    test_logits = log_scores(predictor, test.pixels, progress=progress)

    def measured(logits: Tensor, images: cifar10.Images, divisor: float) -> Evaluation:
        return measure((logits / divisor).softmax(dim=1).numpy(), images.labels, labels)

    result = Run(
        recipe=recipe,
        data="CIFAR-10",
        started_from=None,
        kept_epoch=trainer.epoch,
        epochs=trainer.epochs_trained,
        images=len(train),
        held_out_images=len(held_out),
        seconds=trainer.seconds,
        device=describe_device(where),
        precision=str(trainer.dtype).removeprefix("torch."),
        parameters=predictor.parameters,
        versions=_versions(),
        temperature=temperature,
        held_out=measured(held_out_logits, held_out, temperature),
        held_out_uncalibrated=measured(held_out_logits, held_out, 1.0),
        test=measured(test_logits, test, temperature),
        test_uncalibrated=measured(test_logits, test, 1.0),
    )
    final = replace(stored, temperature=temperature)
    native.write(out, final, dtype=_STORED, training=result.record())
    (out / CARD_FILE).write_text(model_card(result, final), encoding="utf-8")
    assert result.test is not None
    logger.info("%s: test accuracy %.2f%% after %.0f s of training", out, 100 * result.test.accuracy, result.seconds)
    return result


def log_scores(predictor: Predictor, pixels: NDArray[np.uint8], *, progress: bool) -> Tensor:
    """The logarithm of an uncalibrated predictor's scores, float32 [N, K]: its logits but for a constant a row."""
    scores = torch.from_numpy(predict_scores(predictor, pixels, progress=progress))
    return scores.clamp_min(torch.finfo(scores.dtype).tiny).log()


def channel_statistics(pixels: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of values scaled to 0...1, to four decimals.

    Args:
        pixels: uint8 [N, C, H, W].
    """
    means: list[float] = []
    deviations: list[float] = []
    for channel in np.moveaxis(pixels, 1, 0):
        # From the histogram of the 256 values: exact, and without a float copy of every pixel.
        counts = np.bincount(channel.reshape(-1), minlength=256)
        values = np.arange(256) / 255
        mean = float((counts * values).sum() / counts.sum())
        variance = float((counts * (values - mean) ** 2).sum() / counts.sum())
        means.append(round(mean, 4))
        deviations.append(round(variance**0.5, 4))
    return tuple(means), tuple(deviations)


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


def _versions() -> dict[str, str]:
    packages = ("vitserve", "torch", "numpy", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _tensors(images: cifar10.Images, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(images.pixels).to(device), torch.from_numpy(images.labels).to(device)


def _log_epoch(metrics: EpochMetrics) -> None:
    held_out = "" if metrics.held_out_accuracy is None else f", held-out accuracy {metrics.held_out_accuracy:.2%}"
    logger.info(
        "epoch %d: loss %.3f, accuracy %.2f%%%s, %.0f images/s, %.0f s",
        metrics.epoch,
        metrics.train_loss,
        100 * metrics.train_accuracy,
        held_out,
        metrics.images_per_second,
        metrics.seconds,
    )
