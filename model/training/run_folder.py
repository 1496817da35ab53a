"""The folder of a run: checks before the run, and what is written beside the model."""

from __future__ import annotations

import csv
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from model.errors import TrainingError
from model.evaluation.evaluate import Evaluation


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
