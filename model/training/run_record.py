"""The record of a training run: its inputs and its results."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from model.evaluation.evaluate import Evaluation
from model.training.recipe import Recipe
from model.training.teacher import TeacherRecord


@dataclass(frozen=True)
class RunRecord:
    """The result of a run; it is written into the checkpoint's config under `training` and shown by its card.

    Attributes:
        recipe: what the run did.
        data: what it was trained on: `CIFAR-10`, or the name of a folder of pictures.
        started_from: name of the checkpoint that was fine-tuned; None: trained from scratch.
        kept_epoch: the epoch whose weights are kept.
        epochs: number of epochs trained; a fraction where the recipe's time ended during an epoch.
        images, validation_images: sizes of the training set and of the validation set.
        seconds, cpu_seconds: wall time and CPU time of training, evaluations on the validation set and the teacher
            included.
        teacher: what the teacher reached and cost; None without one.
        device, precision: what it ran on, and the dtype of activations and gradients there.
        parameters: number of the model's parameters.
        versions: of Python and the packages that matter.
        temperature: fitted on the validation images; 1 where they are too few or all right (see `round_and_calibrate`).
        validation, validation_uncalibrated: measured with it and without it (temperature 1).
        test, test_uncalibrated: the same on the test set; None where the data have none.
    """

    recipe: Recipe
    data: str
    started_from: str | None
    kept_epoch: int
    epochs: float
    images: int
    validation_images: int
    seconds: float
    cpu_seconds: float
    teacher: TeacherRecord | None
    device: str
    precision: str
    parameters: int
    versions: Mapping[str, str]
    temperature: float
    validation: Evaluation
    validation_uncalibrated: Evaluation
    test: Evaluation | None
    test_uncalibrated: Evaluation | None

    @property
    def measured(self) -> Evaluation:
        """Return the evaluation that the card reports: on the test set or, where there is none, the validation set."""
        return self.test or self.validation

    def record(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        measured = {name: value.record() for name, value in vars(self).items() if isinstance(value, Evaluation)}
        recipe = self.recipe.model_dump(mode="json")
        return {**asdict(self), **measured, "recipe": recipe, "versions": dict(self.versions)}


def describe_device(device: torch.device) -> str:
    """Return a device's name as a person knows it: `NVIDIA H100 80GB HBM3`, or `AMD EPYC 9454 (2 threads)`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    threads = torch.get_num_threads()
    return f"{name} ({threads} thread{'s' if threads > 1 else ''})"


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the numbers."""
    packages = ("vitserve", "torch", "numpy", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
